"""The application every command registers with."""

from tyro.extras import SubcommandApp

app = SubcommandApp()
