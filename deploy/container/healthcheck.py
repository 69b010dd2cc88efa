"""The image's healthcheck: exits with 0 while the server of this container is alive, whether it speaks TLS or not."""

from __future__ import annotations

import http.client
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

# Written by the server once it listens: it knows its port, and whether it has a certificate.
url = urlsplit(Path("/data/url").read_text().strip())
assert url.hostname is not None
if url.scheme == "https":
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate is for the name that clients use, and need not be valid for this address.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection: http.client.HTTPConnection = http.client.HTTPSConnection(url.hostname, url.port, timeout=4, context=context)
else:
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=4)
connection.request("GET", "/livez")
sys.exit(connection.getresponse().status != 200)
