"""Reads the files and opens the sockets of ``dist-aclgraph serve``, before the service starts.

The sockets stay open until the service ends, so that every later owner and ingress uses the same
sockets.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from dist_aclgraph.actors.deployment.owner_link import listen_for_ingress
from dist_aclgraph.actors.host.run_directory import RunDirectory
from dist_aclgraph.cli.checks import check_deployment
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.files.log_folder import with_log_folder
from dist_aclgraph.serve.http.access import Access, read_access
from dist_aclgraph.serve.http.server import listen_at
from dist_aclgraph.serve.observe.traces import check_packages
from dist_aclgraph.text.rerank import answer_tokens
from dist_aclgraph.text.tokenizer import Tokenizer

OWNER = "owner"  # name of the socket at which the owner of the deployment answers


@dataclass(frozen=True)
class Opened:
    """A checked configuration, and the sockets that the processes of its service share.

    Attributes:
        http: for each ingress, the listening socket for clients.
        link: socket at which the owner of the deployment listens for the ingress.
        directory: directory of the socket file of ``link``.
    """

    config: Config
    access: Access
    tokenizer: Tokenizer
    http: tuple[socket.socket, ...]
    link: socket.socket
    directory: RunDirectory

    @property
    def owner_path(self) -> str:
        return f"{self.directory.path}/{OWNER}"


@contextmanager
def open_service(config: Config) -> Iterator[Opened]:
    """Check a configuration, and listen at its ports inside this context.

    Raises:
        ConfigError: the port is in use; other hosts could use the service without an API key; or
            the configuration does not fit the model.
        DeviceError: the NPUs of this machine cannot be used.
        ModelError: the model cannot be served.
        MissingPackageError: the key ``serve.traces`` needs packages that are not installed.
    """
    replicas = [config.serve.of_replica(index) for index in range(config.serve.replicas)]
    if len(replicas) > 1 and not config.recovery.keep_answers:
        raise ConfigError(
            f"serve.replicas is {len(replicas)}, but with recovery.keep_answers=false the service "
            "is one process: leave one of the two keys out"
        )
    access = read_access(config.serve, checks_host=True)
    if config.serve.traces is not None:
        check_packages()
    with ExitStack() as stack:
        http = tuple(stack.enter_context(listen_at(replica)) for replica in replicas)
        config = with_log_folder(check_deployment(config))
        tokenizer = Tokenizer.of(config)
        if config.task == "rerank":
            # If the model cannot be used, this call raises an error before anything is started.
            answer_tokens(tokenizer)
        directory = RunDirectory()
        try:
            with listen_for_ingress(f"{directory.path}/{OWNER}") as link:
                yield Opened(config, access, tokenizer, http, link, directory)
        finally:
            directory.remove()
            for replica in replicas:
                if replica.uds is not None:
                    with suppress(OSError):
                        os.unlink(replica.uds)
