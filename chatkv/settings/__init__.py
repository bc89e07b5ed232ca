"""What a user sets once: in a file, in the environment, or for one command by its flags."""
