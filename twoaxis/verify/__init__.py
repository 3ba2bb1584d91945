"""The conformance kit: everything the library's own streams and mixers must pass, on anybody's.

from twoaxis.verify import check_stream

report = check_stream(MyStream)          # a class, registered or not, or a registered name
report.show()
report.raise_if_failed()
"""

from twoaxis.verify.load import check_file
from twoaxis.verify.mixer import check_mixer
from twoaxis.verify.report import Check, Report
from twoaxis.verify.stream import check_stream

__all__ = ["Check", "Report", "check_file", "check_mixer", "check_stream"]
