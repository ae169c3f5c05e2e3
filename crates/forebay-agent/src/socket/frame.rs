//! Frames on the socket: bounded, with few descriptors beside each.

use std::io::{IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forebay_error::{Code, Error, Result};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Bytes of a request: an action has less than a hundred, the longest text in one a few thousand.
pub(super) const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Bytes of an answer: the status of 10,000 steps on three tiers has 2 MB.
pub(super) const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Memory is taken as bytes arrive, in pieces of this size.
const PIECE_BYTES: usize = 64 << 10;

/// A frame, in either direction:
///
/// | bytes | what |
/// | --- | --- |
/// | 4 | length of the text, little endian |
/// | length | JSON, one object |
///
/// A request for `track` carries one descriptor (SCM_RIGHTS) with any of its bytes, one for `stage` three; no answer
/// carries any.
pub(super) struct Frame {
    pub(super) text: Vec<u8>,
    /// In the order in which they came.
    pub(super) fds: Vec<OwnedFd>,
}

/// Descriptors of a frame, at the most.
pub(super) const FDS_MAX: usize = 3;

/// Takes frames off a stream.
pub(super) struct Reader<'a> {
    stream: &'a UnixStream,
    fds: Vec<OwnedFd>,
    /// How many are taken with a frame.
    most_fds: usize,
    began: bool,
}

impl<'a> Reader<'a> {
    pub(super) fn new(stream: &'a UnixStream) -> Self {
        Self { stream, fds: Vec::new(), most_fds: 1, began: false }
    }

    /// The same for frames with up to [`FDS_MAX`] descriptors.
    pub(super) fn with_fds(stream: &'a UnixStream) -> Self {
        Self { most_fds: FDS_MAX, ..Self::new(stream) }
    }

    /// Whether the last frame began: after a `timeout` without one the other side was only idle.
    pub(super) fn began(&self) -> bool {
        self.began
    }

    /// The next frame; `None` where the stream ended before one. The first byte may take `idle`, the rest `time`.
    ///
    /// Errors: `timeout`; `truncated` for a frame that broke off; `unsupported` for one of more than `most` bytes, or
    /// with more descriptors than are taken; I/O.
    pub(super) fn next(
        &mut self,
        most: usize,
        idle: Option<Duration>,
        time: Duration,
    ) -> Result<Option<Frame>> {
        let mut head = [0; 4];
        (self.fds, self.began) = (Vec::new(), false);
        self.wait(idle)?;
        let first = self.some(&mut head)?;
        self.began = first > 0;
        if first == 0 {
            return Ok(None);
        }
        let until = Instant::now() + time;
        let rest = head.get_mut(first..).unwrap_or_default();
        self.all(rest, until)?;
        let len = usize::try_from(u32::from_le_bytes(head)).unwrap_or(usize::MAX);
        if len > most {
            let what = format!("a frame of {len} bytes, at most {most} are taken");
            return Err(Error::new(Code::Unsupported, what));
        }
        let mut text = Vec::new();
        while text.len() < len {
            let from = text.len();
            text.resize(len.min(from + PIECE_BYTES), 0);
            self.all(text.get_mut(from..).unwrap_or_default(), until)?;
        }
        Ok(Some(Frame { text, fds: std::mem::take(&mut self.fds) }))
    }

    /// Sets how long the next call may wait.
    fn wait(&self, time: Option<Duration>) -> Result<()> {
        let time = time.map(|time| time.max(Duration::from_millis(1)));
        let set = self.stream.set_read_timeout(time);
        set.map_err(|error| Error::io("cannot set a time limit", error))
    }

    fn all(&mut self, mut to: &mut [u8], until: Instant) -> Result<()> {
        while !to.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(Code::Timeout, "a frame did not come in time"));
            }
            self.wait(Some(left))?;
            match self.some(to)? {
                0 => return Err(Error::new(Code::Truncated, "a frame broke off")),
                got => to = to.get_mut(got..).unwrap_or_default(),
            }
        }
        Ok(())
    }

    /// What is there, at least a byte; 0 at the end.
    fn some(&mut self, to: &mut [u8]) -> Result<usize> {
        // Room for more, so that too many are seen and closed, not left in the queue.
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX + 1))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let slices = &mut [IoSliceMut::new(to)];
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(self.stream, slices, &mut control, RecvFlags::CMSG_CLOEXEC)
        });
        let received = received.map_err(|errno| match errno {
            Errno::AGAIN => Error::new(Code::Timeout, "nothing came in time"),
            errno => Error::io("cannot read from the socket", errno.into()),
        })?;
        let mut many = received.flags.contains(ReturnFlags::CTRUNC);
        for message in control.drain() {
            let RecvAncillaryMessage::ScmRights(fds) = message else { continue };
            for fd in fds {
                // One too many is closed here.
                match self.fds.len() < self.most_fds {
                    true => self.fds.push(fd),
                    false => many = true,
                }
            }
        }
        if many {
            let what = "more descriptors came with a frame than are taken, or some were lost";
            return Err(Error::new(Code::Unsupported, what));
        }
        Ok(received.bytes)
    }
}

/// Sends a frame, in at most `time` for each call that waits. Errors: `timeout`, I/O.
pub(super) fn send(
    mut stream: &UnixStream,
    text: &[u8],
    fds: &[BorrowedFd<'_>],
    time: Duration,
) -> Result<()> {
    let len = u32::try_from(text.len()).map_err(|error| {
        Error::new(Code::Unsupported, "a frame is too large").with_source(error)
    })?;
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::WouldBlock => Error::new(Code::Timeout, "nobody took a frame in time"),
        _ => Error::io("cannot write to the socket", error),
    };
    stream.set_write_timeout(Some(time)).map_err(failed)?;
    let head = len.to_le_bytes();
    let sent = match fds {
        [] => 0,
        _ => send_with(stream, &head, fds).map_err(|errno| failed(errno.into()))?,
    };
    stream.write_all(head.get(sent..).unwrap_or_default()).map_err(failed)?;
    stream.write_all(text).map_err(failed)
}

/// Sends bytes in one call, with descriptors beside them, [`FDS_MAX`] at the most; how many went. Errors: those of the
/// call.
pub(crate) fn send_with(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS);
    }
    let slices = [IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| sendmsg(&socket, &slices, &mut control, SendFlags::NOSIGNAL))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    const TIME: Duration = Duration::from_secs(5);

    #[test]
    fn frames_carry_text_and_a_descriptor() {
        let (one, two) = UnixStream::pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let open = std::fs::File::open(folder.path()).unwrap();
        let mut reader = Reader::new(&two);
        send(&one, b"{}", &[], TIME).unwrap();
        send(&one, b"{\"a\":1}", &[open.as_fd()], TIME).unwrap();
        let next = |reader: &mut Reader<'_>| reader.next(100, None, TIME).unwrap();
        let first = next(&mut reader).unwrap();
        assert_eq!((first.text.as_slice(), first.fds.is_empty()), (b"{}".as_slice(), true));
        let second = next(&mut reader).unwrap();
        let stat = rustix::fs::fstat(&second.fds[0]).unwrap();
        assert_eq!(stat.st_ino, std::fs::metadata(folder.path()).unwrap().ino());
        drop(one);
        assert!(next(&mut reader).is_none());
    }

    #[test]
    fn frames_are_bounded_in_bytes_and_time() {
        let (mut one, two) = UnixStream::pair().unwrap();
        let mut reader = Reader::new(&two);
        one.write_all(&u32::MAX.to_le_bytes()).unwrap();
        let error = reader.next(100, None, TIME).err().unwrap();
        assert_eq!(error.code(), Code::Unsupported);
        let (mut one, two) = UnixStream::pair().unwrap();
        let mut reader = Reader::new(&two);
        one.write_all(&[9, 0]).unwrap();
        let error = reader.next(100, None, Duration::from_millis(30)).err().unwrap();
        assert_eq!(error.code(), Code::Timeout);
        let idle = Some(Duration::from_millis(10));
        assert_eq!(reader.next(100, idle, TIME).err().unwrap().code(), Code::Timeout);
        one.write_all(&[9, 0, 0, 0, 1]).unwrap();
        drop(one);
        assert_eq!(reader.next(100, None, TIME).err().unwrap().code(), Code::Truncated);
    }

    #[test]
    fn some_descriptors_keep_their_order_where_they_are_taken() {
        let (one, two) = UnixStream::pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<_> = (0..=FDS_MAX)
            .map(|number| {
                std::fs::File::create_new(folder.path().join(number.to_string())).unwrap()
            })
            .collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send(&one, b"{}", &fds[..FDS_MAX], TIME).unwrap();
        let frame = Reader::with_fds(&two).next(100, None, TIME).unwrap().unwrap();
        let inode = |file: BorrowedFd<'_>| rustix::fs::fstat(file).unwrap().st_ino;
        let got: Vec<u64> = frame.fds.iter().map(|fd| inode(fd.as_fd())).collect();
        assert_eq!(got, fds[..FDS_MAX].iter().map(|fd| inode(*fd)).collect::<Vec<_>>());
        // One more comes with the rest of the frame.
        send_with(&one, &[2, 0, 0, 0], &fds[..FDS_MAX]).unwrap();
        send_with(&one, b"{}", &fds[FDS_MAX..]).unwrap();
        let error = Reader::with_fds(&two).next(100, None, TIME).err().unwrap();
        assert_eq!(error.code(), Code::Unsupported);
    }

    #[test]
    fn many_descriptors_are_refused_and_closed() {
        let open_now = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let (one, two) = UnixStream::pair().unwrap();
        let files: Vec<_> = (0..9).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        for some in [&fds[..2], &fds[..]] {
            let before = open_now();
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
            let mut control = SendAncillaryBuffer::new(&mut room);
            assert!(control.push(SendAncillaryMessage::ScmRights(some)));
            let slices = [IoSlice::new(&[0, 0, 0, 0])];
            sendmsg(&one, &slices, &mut control, SendFlags::empty()).unwrap();
            let mut reader = Reader::new(&two);
            let error = reader.next(100, None, TIME).err().unwrap();
            assert_eq!(error.code(), Code::Unsupported);
            drop(reader);
            // Other tests open files at the same time; a leak would stay.
            let settled = (0..100).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                open_now() <= before
            });
            assert!(settled, "descriptors stay open");
        }
    }
}
