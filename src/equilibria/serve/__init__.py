"""`equilibria serve`: runs, live, in a browser; read-only, and nothing leaves this machine.

From the disk to the screen: `follow` reads the samples that were appended to one run and makes its page, `catalogue`
knows all runs, `hub` reads them while somebody watches and announces changes, `queries` computes comparisons, plans
and forecasts, `pages` has the HTML, scripts and styles, `app` answers requests in the threads of `worker`, `guard`
checks every request, `server` runs it all.
"""
