"""HTTP to programs on this machine.

httpx loads the machine's certificates for every call that is made without a client: 18 ms of
processor time on a quiet machine, and seconds beside engines that have the cores.
"""

from functools import partial

import httpx

__all__ = ["get", "post"]

get = partial(httpx.get, verify=False, trust_env=False)
post = partial(httpx.post, verify=False, trust_env=False)
