"""What a run did, beside what it should have done, as one offline page."""

from equilibria.report.page import report_html, write_report

__all__ = ["report_html", "write_report"]
