//! Sizes, rates and times as people read them.

use forebay_tier::status::CopiesStatus;

/// `1.6 TB`: three digits, decimal units, as drives and networks are sold.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64;
    let mut unit = 0;
    // 999.95 would be shown as 1000.0.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.digits$} {}", UNITS.get(unit).copied().unwrap_or("EB"))
}

/// `1.2 GB/s`.
pub fn rate(bytes_a_second: f64) -> String {
    if bytes_a_second < 1.0 {
        return "0 B/s".to_owned();
    }
    // Above 2^64 there is none.
    format!("{}/s", bytes(bytes_a_second as u64))
}

/// `45 s`, `12 min`, `3 h`, `4 d`: rounded down, in the largest unit of which there are two.
pub fn time(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0..120 => format!("{whole} s"),
        120..7200 => format!("{} min", whole / 60),
        7200..172_800 => format!("{} h", whole / 3600),
        _ => format!("{} d", whole / 86_400),
    }
}

/// `1 step`, `2 steps`.
pub fn count(number: u64, one: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        _ => format!("{number} {one}s"),
    }
}

/// What there is to say of copies on other nodes, in lines.
pub fn copies(copies: &CopiesStatus) -> Vec<String> {
    let wanted = match copies.wanted {
        0 => "This node's files are not copied to others".to_owned(),
        1 => "Each file is to be on 1 other node".to_owned(),
        wanted => format!("Each file is to be on {wanted} other nodes"),
    };
    let files = count(copies.held_files, "file");
    let verb = if copies.held_files == 1 { "is" } else { "are" };
    let held = format!("{files} of other nodes {verb} here ({})", bytes(copies.held_bytes));
    let failed = match copies.failures {
        0 => String::new(),
        failures => format!("; {failures} tries failed"),
    };
    let mut lines = vec![format!("{wanted}; {held}{failed}")];
    lines.extend(copies.steps.iter().rev().map(|step| {
        let on = match step.on.as_slice() {
            [] => "on no other node yet".to_owned(),
            on => format!("on {}", on.join(", ")),
        };
        format!("step {} ({}): {on}", step.step, bytes(step.bytes))
    }));
    lines.extend(copies.error.iter().map(|error| format!("this drive: {error}")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        let cases = [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 KB"),
            (9_994, "9.99 KB"),
            (9_996, "10.0 KB"),
            (99_960, "100 KB"),
            (999_600, "1.00 MB"),
            (16_000_000_000, "16.0 GB"),
            (u64::MAX, "18.4 EB"),
        ];
        for (number, text) in cases {
            assert_eq!(bytes(number), text);
        }
    }

    #[test]
    fn rates_and_times_of_any_number() {
        assert_eq!(rate(0.2), "0 B/s");
        assert_eq!(rate(f64::NAN), "0 B/s");
        assert_eq!(rate(2.5e9), "2.50 GB/s");
        assert_eq!(rate(f64::INFINITY), "18.4 EB/s");
        assert_eq!(time(-1.0), "0 s");
        assert_eq!(time(f64::NAN), "0 s");
        assert_eq!(time(119.9), "119 s");
        assert_eq!(time(7199.0), "119 min");
        assert_eq!(time(1e9), "11574 d");
        assert_eq!((count(1, "step"), count(0, "step")), ("1 step".into(), "0 steps".into()));
    }
}
