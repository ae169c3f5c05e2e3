//! The terminal: the other screen while it is shown, keys without a newline, and as it was at the end, however that
//! comes about.

use std::io::Write;
use std::time::Duration;

use forebay_error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::stdio::{stdin, stdout};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// The other screen, no cursor.
const TAKE: &str = "\x1b[?1049h\x1b[?25l";
/// Back.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// To the corner; to the end of a line, and of the screen, nothing.
const HOME: &str = "\x1b[H";
const REST_OF_LINE: &str = "\x1b[K";
const REST: &str = "\x1b[J";

/// What somebody wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// The next look.
    Again,
    /// The end.
    Quit,
}

/// A terminal that shows frames.
pub(super) struct Screen {
    before: Termios,
}

/// Columns and lines, where stdout is a terminal that says so.
pub(super) fn size() -> Option<(usize, usize)> {
    let size = tcgetwinsize(stdout()).ok()?;
    let size = (usize::from(size.ws_col), usize::from(size.ws_row));
    (size.0 > 0 && size.1 > 0).then_some(size)
}

impl Screen {
    pub(super) fn take() -> Result<Self> {
        let failed = |errno: Errno| Error::io("cannot use the terminal", errno.into());
        let before = tcgetattr(stdin()).map_err(failed)?;
        let mut keys = before.clone();
        // Ctrl-C stays a signal.
        keys.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(stdin(), OptionalActions::Now, &keys).map_err(failed)?;
        let screen = Self { before };
        screen.write(TAKE)?;
        Ok(screen)
    }

    /// Shows lines, as many as fit, without flicker: over the old ones.
    pub(super) fn draw(&mut self, text: &str, height: usize) -> Result<()> {
        let lines: Vec<&str> = text.lines().take(height).collect();
        let lines = lines.join(&format!("{REST_OF_LINE}\r\n"));
        self.write(&format!("{HOME}{lines}{REST_OF_LINE}{REST}"))
    }

    /// Waits for a key, at most that long. A signal ends it too.
    pub(super) fn key(&self, time: Duration) -> Result<Key> {
        let input = stdin();
        let mut fds = [PollFd::new(&input, PollFlags::IN)];
        let time = Timespec::try_from(time).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        match poll(&mut fds, Some(&time)) {
            Ok(0) | Err(Errno::INTR) => return Ok(Key::Again),
            Ok(_) => {}
            Err(errno) => return Err(Error::io("cannot wait for a key", errno.into())),
        }
        let mut byte = [0];
        let read = rustix::io::read(input, &mut byte);
        match (read, byte) {
            // The end of input, and of a text (Ctrl-D).
            (Ok(0), _) | (Ok(_), [b'q' | b'Q' | 4]) => Ok(Key::Quit),
            (Ok(_) | Err(Errno::INTR), _) => Ok(Key::Again),
            (Err(errno), _) => Err(Error::io("cannot read a key", errno.into())),
        }
    }

    fn write(&self, text: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())
            .and_then(|()| out.flush())
            .map_err(|error| Error::io("cannot write to the terminal", error))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // With the terminal gone there is nothing to put right.
        let _ = self.write(LEAVE);
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}
