"""Column types, and the base class of every table."""

from datetime import datetime
from typing import Annotated, Any

from sqlalchemy import BigInteger, DateTime, Double, Integer, MetaData, SmallInteger, Text, text
from sqlalchemy.dialects.postgresql import JSONB, UUID
from sqlalchemy.orm import DeclarativeBase, mapped_column

Int = Annotated[int, mapped_column(Integer)]
BigInt = Annotated[int, mapped_column(BigInteger)]
SmallInt = Annotated[int, mapped_column(SmallInteger)]
Float = Annotated[float, mapped_column(Double)]
Str = Annotated[str, mapped_column(Text)]
Time = Annotated[datetime, mapped_column(DateTime(timezone=True))]
Json = Annotated[dict[str, Any], mapped_column(JSONB)]
Uuid = Annotated[str, mapped_column(UUID(as_uuid=False))]


NOW = text("now()")


class Base(DeclarativeBase):
    """The base class of every table; it names every constraint by one rule."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
