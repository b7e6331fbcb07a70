"""Commands that need the development stack, which is the distribution kvrouter-devstack."""
