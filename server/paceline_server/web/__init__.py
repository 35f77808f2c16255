"""HTTP for people and for Prometheus: a page, metrics, and jobs and events as JSON; off without `ServerSettings.http`.

server.py      listens, on the coordinator's loop, with its TLS files; holds at most so many connections
routes.py      the paths: who may ask, what is answered, which error becomes which status
asking.py      what operators ask members: last lines, stacks, a trace
reading.py     the process that reads what members have answered
stream.py      a job's state twice a second, built once for all who watch it
web_limits.py  limits for callers, and for streams
metrics.py     one collector for Prometheus, which reads the jobs when it is asked
static/        the page: HTML, CSS and JavaScript without a build

Needs aiohttp and prometheus_client (the extra `http`), which are imported when the server starts and not before.
"""
