"""Training scripts as people write them, in small: what `watch` says about each and what not, bit for bit.

Each file is one kind of script, after the public ones that people start from. The loops, parameter groups, schedules
and clipping are faithful; networks and data are as small as they can be.
"""
