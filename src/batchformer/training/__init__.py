"""What every training shares and no task owns: the contract of a task, optimizers, schedules, the captured step."""
