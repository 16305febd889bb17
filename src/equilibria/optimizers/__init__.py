"""The rule that a torch optimizer's parameter group follows, and time budgets for work inside hooks."""
