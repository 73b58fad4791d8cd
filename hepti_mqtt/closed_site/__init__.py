"""A closed site: its authority, certificate, users by role, and the files that broker and users need."""
