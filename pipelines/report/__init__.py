"""Stage `report`: one page of tables and plots."""
