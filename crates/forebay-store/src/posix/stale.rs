//! Names that lead to what is gone.
//!
//! A client of a network file system remembers which file a name is, and the server has forgotten that one when another
//! machine (on GlusterFS: anybody) has replaced or removed it. NFS and GlusterFS say `ESTALE` then, GlusterFS `EBADFD`
//! as well, and `ENOENT` when what was opened is read. What is there now is found by asking for the name again, after a
//! pause in which the client gives up what it remembers. Only what changes nothing is asked again.

use std::time::Duration;

use rustix::io::Errno;

/// Before each new try: longer in all than clients remember names (3 s on NFS for files that change often, 1 s on
/// GlusterFS).
const PAUSES: [Duration; 7] = [
    Duration::ZERO,
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(600),
    Duration::from_millis(1200),
    Duration::from_millis(2000),
];

/// Whether an error says so.
pub(super) fn is_stale(errno: Errno) -> bool {
    matches!(errno, Errno::STALE | Errno::BADFD)
}

/// Asks until the answer is about what is there now, or for some 4 s.
pub(super) fn again<T, E>(
    mut ask: impl FnMut() -> Result<T, E>,
    stale: impl Fn(&E) -> bool,
) -> Result<T, E> {
    for pause in PAUSES {
        match ask() {
            Err(error) if stale(&error) => std::thread::sleep(pause),
            answer => return answer,
        }
    }
    ask()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_asked_for_again_and_all_else_is_not() {
        for (errno, fails, asked) in
            [(Errno::STALE, 3, 4), (Errno::BADFD, 1, 2), (Errno::NOENT, 1, 1), (Errno::IO, 1, 1)]
        {
            let mut count = 0;
            let answer = again(
                || {
                    count += 1;
                    if count <= fails { Err(errno) } else { Ok(count) }
                },
                |errno| is_stale(*errno),
            );
            assert_eq!((count, answer.is_ok()), (asked, asked > fails), "{errno}");
        }
    }
}
