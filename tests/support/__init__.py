"""What several tests share: references, small models, checks and paths. No test module imports another."""
