"""Ends with status 0 if the service in this container is ready: the health check of the image.

With ``KVROUTER_TLS_CERT_FILE`` it shows that certificate, and expects one of the same authority.
"""

from __future__ import annotations

import os
import ssl
import urllib.request

PORT = os.environ["KVROUTER_HTTP_BIND"].rpartition(":")[2]

if own := os.environ.get("KVROUTER_TLS_CERT_FILE"):
    context = ssl.create_default_context(cafile=os.environ["KVROUTER_TLS_CA_FILE"])
    context.load_cert_chain(own, os.environ["KVROUTER_TLS_KEY_FILE"])
    urllib.request.urlopen(f"https://localhost:{PORT}/ready", timeout=2, context=context)
else:
    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=2)
