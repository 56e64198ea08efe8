"""From the plan and its numbers to one file."""
