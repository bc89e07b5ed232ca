"""What `chatkv doctor` looks at: each check yields findings, and says what to do about them."""
