"""Pictures of results and schedules. They need matplotlib (``pip install 'leanmla[plot]'``); the numbers in them do not."""
