"""What every training shares and no task owns."""
