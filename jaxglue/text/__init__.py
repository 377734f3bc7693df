"""Text of answers: tokens decoded as they come, thinking, and tool calls in each family's format."""
