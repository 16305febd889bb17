"""`equilibria serve`: runs, live, in a browser; read-only, and nothing leaves this machine.

From the disk to the screen: `tail` reads what was appended, `thinned` keeps a bounded part of it, `follow` knows one
run and `catalogue` all of them, `views` makes pages of them with what `report`, `planning` and `forecasting` have,
`hub` tells every viewer that something is new, `app` answers requests, `server` runs it.
"""
