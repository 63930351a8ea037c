"""Serve an index over HTTP: JSON for programs, and a page to search by typing.

`app` has the endpoints, `running` the server, and `limits` what a request may cost. `guard` checks requests before the
endpoints see them, `queue` computes concurrent queries together, `served` holds the index and opens a replaced one,
`answers` turns results into JSON, and `metrics` counts. `page/` has the files that the browser loads.
"""

from itm_fast.serve.app import create_app
from itm_fast.serve.limits import Limits
from itm_fast.serve.running import serve

__all__ = ["Limits", "create_app", "serve"]
