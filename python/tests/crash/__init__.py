"""Jobs that are killed in the tests of crashes, and what must be true of the folder that they leave."""
