"""The command line: thin faces over the client and the store."""
