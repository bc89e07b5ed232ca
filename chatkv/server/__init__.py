"""The engine's process: one runtime for every face on the machine, behind HTTP."""
