"""What runs on several ranks in the tests of checkpoints, and how it is started."""
