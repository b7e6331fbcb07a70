"""What is sent: generated, or read from files."""
