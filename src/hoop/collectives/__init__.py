"""What ranks do together: every collective as a plan, and the communicator that runs it."""
