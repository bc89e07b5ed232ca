"""What a user tells the chat itself, whatever it is shown on: commands, and what they need."""
