"""What runs on the controller: the command line of the collection and what its scripts share."""
