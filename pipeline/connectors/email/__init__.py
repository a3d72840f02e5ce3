"""Connector for mail over SMTP, with an optional folder of sent mail over IMAP."""

from pipeline.connectors.email.connector import Email, EmailWithSent, Smtp
from pipeline.connectors.email.imap import Imap
from pipeline.connectors.email.sockets import Tls

__all__ = ["Email", "EmailWithSent", "Imap", "Smtp", "Tls"]
