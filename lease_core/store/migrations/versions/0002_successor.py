"""A namespace can be sealed in favour of a copy, which it names."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("omnirelay_head", sa.Column("successor", sa.Text))
