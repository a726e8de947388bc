"""What ``compute-sanitizer`` printed: its summary, and whose kernels its reports name.

The tool puts ``=========`` in front of its lines; a report's first line has one space behind, the
rest of it more. The form of the lines: NVIDIA's Compute Sanitizer manual.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["Report", "read_report"]

SUMMARY = re.compile(r"^========= ERROR SUMMARY: (\d+) errors?$", re.M)
RACES = re.compile(
    r"^========= RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) \w+, (\d+)", re.M
)
# Lines of the tool that are no report. What stands behind "ERROR SUMMARY" is read from SUMMARY.
NO_REPORT = re.compile(
    r"COMPUTE-SANITIZER|\w+ SUMMARY|Target application returned an error"
    r"|Error: process didn't terminate successfully"
)
# initcheck's reports of copies, which may well hold rows that nothing wrote: in the form of the
# manual, and in that of the tool of CUDA 13.0, which says so in the second line.
COPY = re.compile(
    r"Host API uninitialized memory access"
    r"|Host API memory access error.*\n\s*Uninitialized access.* by cudaMemcpy source"
)


@dataclass
class Report:
    """summary: what the last line says was found; None: it is missing, the tool did not finish.

    reports: texts of those that name one of our kernels, or no kernel. others: how many name other
    kernels only, or are of copies.
    """

    summary: int | None = None
    reports: list[str] = field(default_factory=list)
    others: int = 0

    @property
    def errors(self) -> int:
        """Ours: reports, or what the summary counts beyond all that were printed."""
        return max(len(self.reports), (self.summary or 0) - self.others)

    def distinct(self) -> list[str]:
        """The reports that differ in more than addresses, threads and counts."""
        first: dict[str, str] = {}
        for report in self.reports:
            lines = [line for line in report.splitlines() if " by thread" not in line]
            key = re.sub(r"0x[0-9a-f]{6,}|[\d,]+ (bytes|hazards?)", "", "\n".join(lines[:4]))
            first.setdefault(key, report)
        return list(first.values())


def read_report(text: str, kernels: Collection[str]) -> Report:
    """The report in a process's output. kernels: names of ours."""
    report = Report()
    if races := RACES.findall(text):
        shown, errors, warnings = (int(number) for number in races[-1])
        report.summary = max(shown, errors + warnings)
    elif summaries := SUMMARY.findall(text):
        report.summary = int(summaries[-1])
    ours = re.compile(r"\b(" + "|".join(map(re.escape, sorted(kernels))) + r")\b")
    for part in re.split(r"^========= (?=\S)", text, flags=re.M)[1:]:
        if NO_REPORT.match(part):
            continue
        lines = [part.splitlines()[0]]
        for line in part.splitlines()[1:]:
            if not re.match(r"=========\s+\S", line):
                break
            lines.append(line.removeprefix("=========").strip())
        whole = "\n    ".join(lines)
        names_a_kernel = re.search(r"\bat \S+.*\+0x[0-9a-f]+|\bat 0x[0-9a-f]+ in \S", whole)
        if (names_a_kernel or COPY.match(whole)) and not ours.search(whole):
            report.others += 1
        else:
            report.reports.append(whole)
    return report
