//! `/metrics`: what Prometheus collects, in its text format (version 0.0.4), which is a dozen lines to write.
//!
//! Every metric is a line in [`FAMILIES`]: name, kind, labels, help, and the function that reads it out of a job's
//! status or out of the agent's own [`Counts`]. There is no registry that could differ from what is shown elsewhere,
//! and `docs/METRICS.md` is compared with the table by a test. Labels have few values: tiers, jobs and codes are
//! bounded.

mod counts;
mod families;

use std::fmt::Write;

use forebay_tier::status::Status;

use crate::job::Job;
pub use counts::Counts;
use families::FAMILIES;

/// What kind a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It only grows, from 0 at the start.
    Counter,
    /// It goes up and down.
    Gauge,
}

impl Kind {
    /// As Prometheus writes it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// Where the values of a metric come from.
#[derive(Clone, Copy)]
pub(crate) enum From {
    /// One for each job.
    Job(fn(&Status, &Job, &mut Samples<'_>)),
    /// The agent's own.
    Agent(fn(&Counts, &mut Samples<'_>)),
}

/// A metric, with all its labels.
pub(crate) struct Family {
    /// Its name.
    pub(crate) name: &'static str,
    /// Its kind.
    pub(crate) kind: Kind,
    /// Names of its labels, without `run`, which all of jobs have.
    pub(crate) labels: &'static [&'static str],
    /// What it says.
    pub(crate) help: &'static str,
    from: From,
}

/// Takes the values of one metric.
pub(crate) struct Samples<'a> {
    text: &'a mut String,
    family: &'static Family,
    job: Option<&'a str>,
}

impl Samples<'_> {
    /// One value; `labels` in the order of the family's.
    pub(crate) fn add(&mut self, labels: &[&str], value: f64) {
        debug_assert_eq!(labels.len(), self.family.labels.len(), "{}", self.family.name);
        self.text.push_str(self.family.name);
        let job = self.job.map(|job| ("run", job));
        let own = self.family.labels.iter().copied().zip(labels.iter().copied());
        let mut before = '{';
        for (name, label) in job.into_iter().chain(own) {
            self.text.push(before);
            before = ',';
            self.text.push_str(name);
            self.text.push_str("=\"");
            escape(self.text, label);
            self.text.push('"');
        }
        if before == ',' {
            self.text.push('}');
        }
        // Writing to a String does not fail.
        let _ = writeln!(self.text, " {value}");
    }
}

fn escape(text: &mut String, label: &str) {
    for c in label.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
}

/// All of it.
pub(crate) fn render(jobs: &[std::sync::Arc<Job>], counts: &Counts) -> String {
    let statuses: Vec<_> = jobs.iter().map(|job| (job, job.status())).collect();
    let mut text = String::with_capacity(16 << 10);
    for family in FAMILIES {
        let _ = writeln!(text, "# HELP {} {}", family.name, family.help);
        let _ = writeln!(text, "# TYPE {} {}", family.name, family.kind.as_str());
        match family.from {
            From::Agent(read) => {
                read(counts, &mut Samples { text: &mut text, family, job: None });
            }
            From::Job(read) => {
                for (job, status) in &statuses {
                    let job_name = Some(job.name());
                    read(status, job, &mut Samples { text: &mut text, family, job: job_name });
                }
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Jobs;
    use crate::testing::{HOSTILE, Still, busy};

    fn rendered() -> String {
        let mut status = busy();
        status.tiers[0].name = HOSTILE.to_owned();
        let jobs = Jobs::default();
        jobs.add("default", Still::new(status)).unwrap();
        let counts = Counts::default();
        counts.answered("/", 200);
        counts.answered("/", 200);
        counts.asked("status");
        render(&jobs.all(), &counts)
    }

    #[test]
    fn lines_are_as_prometheus_reads_them() {
        let text = rendered();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            value.parse::<f64>().unwrap();
            assert!(name.starts_with("forebay_"), "{line}");
            let labels = name.split_once('{').map_or("", |(_, labels)| labels);
            assert!(labels.is_empty() || labels.ends_with("\"}"), "{line}");
        }
        assert!(text.contains("forebay_agent_http_answers_total{route=\"/\",status=\"200\"} 2\n"));
        let hostile = r#"tier="<script>alert(1)</script>\"'&\n"#;
        assert!(text.contains(hostile), "{text}");
        let limit = r#"limit_bytes_per_second{run="default",tier="lustre",direction="write"}"#;
        assert!(text.contains(&format!("forebay_tier_{limit} 500000000\n")));
        assert!(
            text.contains(
                "forebay_tier_health{run=\"default\",tier=\"archive\",health=\"down\"} 1\n"
            )
        );
        assert!(
            text.contains("forebay_tier_newest_step{run=\"default\",tier=\"lustre\"} 100\n"),
            "{text}"
        );
        assert!(text.contains("forebay_errors_total{run=\"default\",code=\"io\"} 1\n"));
    }

    /// Each metric has a row in docs/METRICS.md, `| name | kind | labels | help |`, and each row a metric.
    #[test]
    fn the_list_of_metrics_is_right() {
        let page = include_str!("../../../../docs/METRICS.md");
        let mut rows: Vec<&str> =
            page.lines().filter(|line| line.starts_with("| `forebay_")).collect();
        let mut expected = Vec::new();
        for family in FAMILIES {
            let job = matches!(family.from, From::Job(_)).then_some("run");
            let labels: Vec<String> =
                job.iter().chain(family.labels).map(|label| format!("`{label}`")).collect();
            let (name, kind, help) = (family.name, family.kind.as_str(), family.help);
            expected.push(format!("| `{name}` | {kind} | {} | {help} |", labels.join(", ")));
            assert_eq!(name.ends_with("_total"), family.kind == Kind::Counter, "{name}");
        }
        rows.sort_unstable();
        expected.sort_unstable();
        assert_eq!(rows, expected, "\n{}\n", expected.join("\n"));
        let text = rendered();
        for family in FAMILIES {
            assert!(text.contains(&format!("# TYPE {} ", family.name)));
        }
    }

    /// Each name in the dashboard is a metric's.
    #[test]
    fn the_dashboard_asks_for_what_there_is() {
        let text = include_str!("../../../../deploy/grafana/forebay.json");
        let board: serde_json::Value = serde_json::from_str(text).unwrap();
        let mut queries = 0;
        for panel in board["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let query = target["expr"].as_str().unwrap();
                let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let names: Vec<&str> = words.filter(|word| word.starts_with("forebay_")).collect();
                assert!(!names.is_empty(), "{query}");
                for name in names {
                    assert!(FAMILIES.iter().any(|family| family.name == name), "{name}");
                }
                queries += 1;
            }
        }
        assert!(queries >= 10, "{queries}");
    }
}
