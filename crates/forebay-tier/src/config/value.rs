//! Sizes, times and rates as people write them in `forebay.toml`.

use std::num::NonZeroU64;
use std::time::Duration;

use forebay_format::units::{size_unit, time_unit};

use crate::policy::Takes;

/// Longest time that is taken: a thousand years.
const SECONDS_MAX: f64 = 365.0 * 86_400.0 * 1000.0;

/// Takes a number and its unit apart: `1.5 TB`, `8MiB`, `30 s`.
fn split(text: &str) -> Option<(f64, String)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_');
    let (number, unit) = text.split_at_checked(end.unwrap_or(text.len()))?;
    let number: f64 = number.replace('_', "").parse().ok()?;
    Some((number, unit.trim().to_ascii_lowercase()))
}

/// Bytes: `2 TB`, `8 MiB`, `4096`. KB, MB, ... are powers of 1000, KiB, MiB, ... and K, M, ... powers of 1024.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let no_size = || "not a size such as \"2 TB\" or \"8 MiB\"".to_owned();
    let (number, unit) = split(text).ok_or_else(no_size)?;
    let factor = size_unit(&unit).ok_or_else(no_size)?;
    // Whole numbers exactly: they may have more digits than a float keeps.
    let digits: String = text.trim().chars().take_while(|c| *c != '.').collect();
    let whole = digits.trim_end_matches(|c: char| !c.is_ascii_digit()).replace('_', "");
    if !text.contains('.')
        && let Ok(whole) = whole.parse::<u64>()
    {
        return whole.checked_mul(factor).ok_or_else(|| "more than 2^64 bytes".to_owned());
    }
    let bytes = number * factor as f64;
    match (0.0..1.8e19).contains(&bytes) {
        true => Ok(bytes as u64),
        false => Err("more than 2^64 bytes".to_owned()),
    }
}

/// Bytes a second: a size, `/s` after it or not.
pub(super) fn rate(text: &str) -> Result<NonZeroU64, String> {
    let no_rate = || "not a rate such as \"100 MB/s\"".to_owned();
    let bare = text.trim().trim_end_matches("/s").trim_end();
    let bytes = size(bare).map_err(|_| no_rate())?;
    NonZeroU64::new(bytes).ok_or_else(|| "a rate of nothing; leave it out for no limit".to_owned())
}

/// A time: `7 d`, `30 s`, `500 ms`; without a unit, seconds.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let no_time = || "not a time such as \"30 s\" or \"7 d\"".to_owned();
    let (number, unit) = split(text).ok_or_else(no_time)?;
    let factor = time_unit(&unit).ok_or_else(no_time)?;
    let seconds = number * factor;
    match (0.0..=SECONDS_MAX).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("more than a thousand years".to_owned()),
    }
}

/// `all`, `every 1000`, `pinned`.
pub(super) fn takes(text: &str) -> Result<Takes, String> {
    let text = text.trim();
    match text {
        "all" => return Ok(Takes::All),
        "pinned" => return Ok(Takes::Pinned),
        _ => {}
    }
    let every = text.strip_prefix("every ").and_then(|n| n.trim().parse().ok());
    let no = || "not \"all\", \"every N\" or \"pinned\"".to_owned();
    every.map(Takes::Every).ok_or_else(no)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_times_and_rates_are_read() {
        assert_eq!(size("2 TB"), Ok(2_000_000_000_000));
        assert_eq!(size("8MiB"), Ok(8 << 20));
        assert_eq!(size("1.5 GiB"), Ok(3 << 29));
        assert_eq!(size("18446744073709551615"), Ok(u64::MAX));
        assert_eq!(size("9_007_199_254_740_993"), Ok(9_007_199_254_740_993));
        for bad in ["", "x", "-1", "2 QB", "1e9", "20000000 TB", "17179869185 G", "1.2.3"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(rate("100 MB/s").map(NonZeroU64::get), Ok(100_000_000));
        assert_eq!(rate("5"), Ok(NonZeroU64::new(5).unwrap()));
        assert!(rate("0").is_err() && rate("fast").is_err());
        assert_eq!(time("7 d"), Ok(Duration::from_secs(7 * 86_400)));
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("2"), Ok(Duration::from_secs(2)));
        assert!(time("5 y").is_err() && time("99999999 w").is_err());
    }

    #[test]
    fn what_a_tier_takes_is_read() {
        assert_eq!(takes("all"), Ok(Takes::All));
        assert_eq!(takes("every 1000"), Ok(Takes::Every(NonZeroU64::new(1000).unwrap())));
        assert_eq!(takes("pinned"), Ok(Takes::Pinned));
        for bad in ["every 0", "every", "some", ""] {
            assert!(takes(bad).is_err(), "{bad}");
        }
    }
}
