"""What a run did, beside what it should have done: as one offline page, in the terminal, as findings."""

from equilibria.report.page import report_html, write_report
from equilibria.report.recorded import RecordedRun, read_run

__all__ = ["RecordedRun", "read_run", "report_html", "write_report"]
