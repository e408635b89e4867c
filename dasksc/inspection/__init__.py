"""What an atlas holds and what an epoch will be, before anything is read."""
