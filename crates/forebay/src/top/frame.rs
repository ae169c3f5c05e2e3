//! A status as text.

use forebay_agent::words;
use forebay_error::Error;
use forebay_tier::status::{CopyState, Health, Status, StepStatus, TierStatus, Transfer, Trouble};

use super::line::{BAD, BOLD, DIM, GOOD, Line, PLAIN, WARN, WATER};

/// How it is shown.
pub(super) struct Look {
    pub(super) width: usize,
    /// Lines: the list of checkpoints is as long as fits.
    pub(super) height: usize,
    pub(super) color: bool,
    /// Seconds since 1970.
    pub(super) now: f64,
}

/// Errors that are shown, where there is room for a page.
const ERRORS: usize = 5;
/// Checkpoints, however low the terminal.
const STEPS_MIN: usize = 3;
/// And however high.
const STEPS_MAX: usize = 200;

/// All of it, a line each, every line with its end. `trouble`: why it is what was known last.
pub(super) fn text(status: &Status, trouble: Option<&Error>, look: &Look) -> String {
    let mut lines: Vec<String> =
        trouble.iter().flat_map(|error| trouble_lines(error, look)).collect();
    lines.extend([head(status, look), String::new()]);
    let name_width = status.tiers.iter().map(|tier| tier.name.chars().count()).max().unwrap_or(4);
    let name_width = name_width.clamp(4, 20);
    lines.push(title(look, "Tiers"));
    for (number, tier) in status.tiers.iter().enumerate() {
        lines.push(tier_line(look, number, tier, name_width));
        let notes = tier.notes.iter().take(2);
        lines.extend(notes.map(|note| {
            line(look, |line| {
                line.put(PLAIN, "     ").put(DIM, note);
            })
        }));
    }
    lines.extend([String::new(), title(look, "Transfers")]);
    if status.transfers.is_empty() {
        lines.push(line(look, |line| {
            line.put(DIM, "  nothing is under way");
        }));
    }
    lines.extend(status.transfers.iter().map(|transfer| transfer_line(status, look, transfer)));
    let mut tail = vec![String::new(), title(look, "Errors")];
    if status.errors.is_empty() {
        tail.push(line(look, |line| {
            line.put(DIM, "  none");
        }));
    }
    let errors = status.errors.iter().rev().take(ERRORS);
    tail.extend(errors.map(|trouble| error_line(status, look, trouble)));
    let room = look.height.saturating_sub(lines.len() + tail.len() + 3);
    lines.extend([String::new(), steps_title(status, look)]);
    let steps = status.steps.iter().rev().take(room.clamp(STEPS_MIN, STEPS_MAX));
    lines.extend(steps.map(|step| step_line(status, look, step)));
    lines.extend(tail);
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn line(look: &Look, write: impl FnOnce(&mut Line)) -> String {
    let mut line = Line::new(look.width, look.color);
    write(&mut line);
    line.end()
}

/// What went wrong in asking, and that the rest is old.
fn trouble_lines(error: &Error, look: &Look) -> [String; 2] {
    let what = line(look, |line| {
        line.put(BAD, &format!("error[{}]: ", error.code().as_str())).put(PLAIN, error.what());
        if let Some(place) = error.place() {
            line.put(PLAIN, ", ").put(PLAIN, place);
        }
    });
    let old = line(look, |line| {
        line.put(DIM, "what was known last:");
    });
    [what, old]
}

fn title(look: &Look, text: &str) -> String {
    line(look, |line| {
        line.put(BOLD, text);
    })
}

fn head(status: &Status, look: &Look) -> String {
    line(look, |line| {
        line.put(BOLD, "Forebay").put(PLAIN, "  ").put(PLAIN, &status.who);
        line.put(DIM, &format!("  up {}", words::time(status.up_seconds)));
        let transfers = words::count(status.transfers.len() as u64, "transfer");
        line.put(DIM, &format!("  {transfers}, {} waiting", status.waiting));
    })
}

fn tier_line(look: &Look, number: usize, tier: &TierStatus, name_width: usize) -> String {
    let (style, word) = match tier.health {
        _ if tier.paused => (WARN, "paused"),
        Health::Unknown => (DIM, "not asked"),
        Health::Ok => (GOOD, "ok"),
        Health::Troubled => (WARN, "troubled"),
        Health::Full => (BAD, "full"),
        Health::ReadOnly => (BAD, "read only"),
        Health::Down => (BAD, "down"),
    };
    line(look, |line| {
        line.number(DIM, &number.to_string(), 3).column(BOLD, &tier.name, name_width);
        line.column(style, word, 9);
        match tier.capacity_bytes.filter(|&capacity| capacity > 0) {
            Some(capacity) => {
                line.bar(WATER, tier.used_bytes as f64 / capacity as f64, 12);
                let used = words::bytes(tier.used_bytes);
                line.column(PLAIN, &format!("{used} of {}", words::bytes(capacity)), 19);
            }
            None => {
                line.column(PLAIN, "", 12).column(PLAIN, &words::bytes(tier.used_bytes), 19);
            }
        }
        line.put(DIM, "in ").number(PLAIN, &words::rate(tier.write_rate), 9);
        line.put(DIM, "out ").number(PLAIN, &words::rate(tier.read_rate), 9);
        line.put(DIM, &words::count(tier.committed, "step"));
    })
}

fn name(status: &Status, tier: usize) -> &str {
    status.tiers.get(tier).map_or("?", |tier| tier.name.as_str())
}

fn transfer_line(status: &Status, look: &Look, transfer: &Transfer) -> String {
    line(look, |line| {
        line.number(BOLD, &transfer.step.to_string(), 10);
        let way = format!("{} → {}", name(status, transfer.from), name(status, transfer.to));
        line.column(PLAIN, &way, 24);
        let share = transfer.done_bytes as f64 / transfer.total_bytes as f64;
        line.bar(WATER, share, 12);
        let total = words::bytes(transfer.total_bytes);
        line.put(PLAIN, &format!("{} of {total}", words::bytes(transfer.done_bytes)));
        line.put(PLAIN, &format!("  {}", words::rate(transfer.rate)));
        if let Some(left) = transfer.left_seconds {
            line.put(PLAIN, &format!("  {} left", words::time(left)));
        }
        line.put(DIM, &format!("  {}", transfer.priority));
        if transfer.tries > 0 {
            line.put(WARN, &format!("  try {}", transfer.tries.saturating_add(1)));
        }
    })
}

fn steps_title(status: &Status, look: &Look) -> String {
    line(look, |line| {
        line.put(BOLD, "Checkpoints");
        line.put(DIM, &format!("  {}, the newest first", status.steps.len()));
    })
}

fn step_line(status: &Status, look: &Look, step: &StepStatus) -> String {
    line(look, |line| {
        line.number(BOLD, &step.step.to_string(), 10);
        line.number(PLAIN, &words::bytes(step.bytes), 8);
        line.number(DIM, &words::time(step.age_seconds), 7).put(PLAIN, " ");
        for (tier, copy) in step.copies.iter().enumerate() {
            let (style, sign) = match copy {
                CopyState::Absent => (DIM, "○"),
                CopyState::Waiting => (WARN, "◌"),
                CopyState::Moving => (WATER, "◐"),
                CopyState::Partial => (WARN, "◔"),
                CopyState::Committed => (GOOD, "●"),
                CopyState::OnNodes => (GOOD, "◍"),
                CopyState::Copied => (GOOD, "◉"),
                CopyState::Other => (BAD, "≠"),
            };
            line.put(style, sign).put(style, " ").column(style, name(status, tier), 10);
        }
        if step.held {
            line.put(WARN, "held ");
        }
        line.put(PLAIN, &step.pins.join(" "));
    })
}

fn error_line(status: &Status, look: &Look, trouble: &Trouble) -> String {
    line(look, |line| {
        let ago = format!("{} ago", words::time(look.now - trouble.at));
        line.number(DIM, &ago, 14).put(BAD, &trouble.code).put(PLAIN, " ");
        if let Some(tier) = trouble.tier {
            line.put(PLAIN, name(status, tier)).put(PLAIN, " ");
        }
        if let Some(step) = trouble.step {
            line.put(PLAIN, &format!("step {step} "));
        }
        line.put(PLAIN, &trouble.what);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        let tier = |name: &str| TierStatus {
            name: name.to_owned(),
            health: Health::Ok,
            used_bytes: 1_500_000_000,
            capacity_bytes: Some(2_000_000_000),
            ..TierStatus::default()
        };
        let step = |step| StepStatus {
            step,
            copies: vec![CopyState::Committed, CopyState::Moving],
            pins: vec!["\u{1b}[2Jbest".to_owned()],
            ..StepStatus::default()
        };
        Status {
            who: "node".to_owned(),
            tiers: vec![tier("nvme"), tier("bucket")],
            steps: (0..1000).map(step).collect(),
            transfers: vec![Transfer { step: 999, from: 0, to: 7, ..Transfer::default() }],
            errors: vec![Trouble { what: "a\nb".to_owned(), ..Trouble::default() }],
            ..Status::default()
        }
    }

    #[test]
    fn a_frame_fits_its_terminal() {
        let error = Error::new(forebay_error::Code::Io, "a\u{1b}[2Jb".repeat(99)).at("here");
        for (width, height) in [(80, 24), (20, 10), (200, 60), (0, 0)] {
            let look = Look { width, height, color: false, now: 0.0 };
            for (trouble, least) in [(None, 20), (Some(&error), 22)] {
                let text = text(&status(), trouble, &look);
                assert!(text.lines().all(|line| line.chars().count() <= width), "{text}");
                assert!(!text.contains('\u{1b}'), "{text:?}");
                let lines = text.lines().count();
                assert!(lines < height.max(least), "{lines} of {height}: {text}");
            }
        }
    }

    #[test]
    fn what_is_known_is_in_it() {
        let look = Look { width: 120, height: 40, color: true, now: 60.0 };
        let error = Error::new(forebay_error::Code::NotFound, "no agent listens").at("/run/x");
        let text = text(&status(), Some(&error), &look);
        let expected = [
            "error[not_found]: \u{1b}[0mno agent listens, /run/x",
            "node",
            "nvme",
            "1.50 GB of 2.00 GB",
            "999",
            "nvme → ?",
            "60 s ago",
            "a\\nb",
            "\x1b[32m●",
        ];
        for known in expected {
            assert!(text.contains(known), "no {known} in {text}");
        }
    }
}
