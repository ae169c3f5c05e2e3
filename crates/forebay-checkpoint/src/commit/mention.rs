//! Which attempts a commit's `.metadata` names files of, by its bytes alone.
//!
//! A collector removes what the commit does not need, and knows that from one line of `.metadata`, or from a record
//! beside it. Either can be damaged. Names of files are text in any form of `.metadata`, so before anything goes its
//! bytes are searched for the names of what is to go: nothing has to be understood for that, and no length to be
//! believed.
//! There are several such names in every commit, so that no single flipped bit hides them all.

use forebay_engine::{RangeSource, read_exact_at};
use forebay_error::Result;

use super::id::AttemptId;

/// Bytes that are read at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// The longest attempt, and what ends it: `ffffffff-ffffffff_`.
const LONGEST: u64 = 18;
/// Digits of the run.
const RUN_DIGITS: usize = 8;

/// The first attempt that is `wanted` and that a name in `metadata` starts with. Errors: I/O.
pub(crate) fn find(
    metadata: &dyn RangeSource,
    wanted: impl Fn(AttemptId) -> bool,
) -> Result<Option<AttemptId>> {
    let len = metadata.len();
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < len {
        bytes.resize((len - at).min(PIECE_BYTES) as usize, 0);
        read_exact_at(metadata, &mut bytes, at)?;
        if let Some(found) = names_in(&bytes).find(|attempt| wanted(*attempt)) {
            return Ok(Some(found));
        }
        let end = at + bytes.len() as u64;
        // A name may lie across the end of a piece.
        at = if end < len { end - LONGEST } else { end };
    }
    Ok(None)
}

/// The attempts at whose end a name goes on.
fn names_in(bytes: &[u8]) -> impl Iterator<Item = AttemptId> + '_ {
    let dashes = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'-').map(|(at, _)| at);
    dashes.filter_map(|dash| {
        let start = dash.checked_sub(RUN_DIGITS)?;
        let rest = bytes.get(dash + 1..)?;
        let digits = rest.iter().take(RUN_DIGITS).take_while(|byte| byte.is_ascii_hexdigit());
        let end = dash + 1 + digits.count();
        let ends = bytes.get(end) == Some(&b'_');
        let text = std::str::from_utf8(bytes.get(start..end)?).ok()?;
        if ends { text.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::MemorySource;

    fn found(bytes: &[u8], wanted: &str) -> Option<AttemptId> {
        let wanted: AttemptId = wanted.parse().unwrap();
        let source = MemorySource::new(String::new(), bytes.to_vec());
        find(&source, |attempt| attempt == wanted).unwrap()
    }

    #[test]
    fn names_are_found_wherever_they_lie_and_nothing_else_is() {
        let ours: Option<AttemptId> = Some("00000abc-1f".parse().unwrap());
        for at in [0, 7, PIECE_BYTES - 20, PIECE_BYTES - 12, PIECE_BYTES - 9, PIECE_BYTES - 1] {
            let mut bytes = vec![b'-'; at as usize];
            bytes.extend_from_slice(b"00000abc-1f_0_0.distcp");
            bytes.resize(PIECE_BYTES as usize * 2 + 7, 0xff);
            assert_eq!(found(&bytes, "00000abc-1f"), ours, "{at}");
            assert_eq!(found(&bytes, "00000abc-1"), None);
            assert_eq!(found(&bytes, "ffffffff-1f"), None);
        }
        assert_eq!(found(b"forebay.manifest-00000abc-1f_3", "00000abc-1f"), ours);
        // Of the save alone, cut, or of another spelling: no name.
        for other in ["00000abc-1f", "00000abc-1f 0", "00000ABC-1f_0", "0000abc-1f_0", "-1f_0"] {
            assert_eq!(found(other.as_bytes(), "00000abc-1f"), None, "{other}");
        }
        assert_eq!(found(b"", "00000abc-1f"), None);
    }
}
