"""What is claimed about a method, measured: everything the library's own streams and mixers hold, on anybody's.

from twoaxis.verify import check

report = check(MyStream)          # a class, registered or not, or a registered name
report.show()
report.raise_if_failed()

claim.py     Claim, Result, Report                         a claim is a named function that measures one property
subject.py   Subject, Run                                  one variant of a method, alone and inside small decoders
contract, definition, gradients, time, depth, start, costs        claims about any method, by family
theorems.py                                                claims about certain methods and how they are related
run.py       check, check_file, verify
"""

from twoaxis.verify.claim import Report, Result
from twoaxis.verify.run import check, check_file, verify

__all__ = ["Report", "Result", "check", "check_file", "verify"]
