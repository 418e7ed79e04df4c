"""What an operator asks on the command line beside serving: how it goes, what the machine can do, backups."""
