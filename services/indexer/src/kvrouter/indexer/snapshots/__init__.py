"""Takes snapshots of a component, and restores from them."""
