"""The full-screen chat: a face over `chatkv.client` that paints before a model has loaded."""
