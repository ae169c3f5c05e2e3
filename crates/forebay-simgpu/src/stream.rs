//! Streams: a queue and a thread that works through it, late on purpose. **unsafe**: it writes to device memory.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::check::{break_context, context_works, violation};
use crate::config::config;
use crate::device::POISON;
use crate::host;
use crate::kernel::Launch;
use crate::status::{ILLEGAL_ADDRESS, Status};

/// A stream. Its operations are numbered from 1, in the order in which they were queued and will run.
pub(crate) struct Stream {
    pub(crate) id: u64,
    line: Mutex<Line>,
    changed: Condvar,
}

#[derive(Default)]
struct Line {
    waiting: VecDeque<Work>,
    queued: u64,
    done: u64,
    closed: bool,
}

/// A point in a stream: what an event remembers.
#[derive(Clone)]
pub(crate) struct Mark {
    pub(crate) stream: Arc<Stream>,
    pub(crate) number: u64,
}

/// What a stream does.
pub(crate) enum Work {
    Copy(Copy),
    Launch(Launch),
    /// Nothing: an event was put here.
    Point,
    WaitFor(Mark),
    /// Fails, and breaks the context.
    Fail(Status),
}

/// Rows of bytes between host and device, whose ranges were checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) to_device: bool,
    pub(crate) host: usize,
    pub(crate) host_pitch: usize,
    /// Where the bytes are, not the device's address.
    pub(crate) device: usize,
    pub(crate) device_pitch: usize,
    pub(crate) width: usize,
    pub(crate) rows: usize,
}

impl Mark {
    pub(crate) fn is_done(&self) -> bool {
        self.stream.lock().done >= self.number
    }

    /// Sleeps until it is.
    pub(crate) fn wait(&self) {
        let line = self.stream.lock();
        let before = |line: &mut Line| line.done < self.number;
        drop(self.stream.changed.wait_while(line, before));
    }
}

impl Stream {
    /// Starts a stream's thread, which ends when the stream was closed and has nothing left to do.
    pub(crate) fn start(id: u64) -> io::Result<Arc<Self>> {
        let stream =
            Arc::new(Self { id, line: Mutex::new(Line::default()), changed: Condvar::new() });
        let own = stream.clone();
        let thread = std::thread::Builder::new().name(format!("simgpu-stream-{id}"));
        thread.spawn(move || own.run())?;
        Ok(stream)
    }

    /// Puts work at the end.
    pub(crate) fn queue(self: &Arc<Self>, work: Work) -> Mark {
        let mut line = self.lock();
        line.waiting.push_back(work);
        line.queued += 1;
        let number = line.queued;
        drop(line);
        self.changed.notify_all();
        Mark { stream: self.clone(), number }
    }

    /// The last thing that was queued.
    pub(crate) fn end(self: &Arc<Self>) -> Mark {
        let number = self.lock().queued;
        Mark { stream: self.clone(), number }
    }

    /// No more will be queued.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn run(&self) {
        let mut random = Random(config().seed ^ self.id.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        while let Some(work) = self.next() {
            self.work(work, &mut random);
            self.lock().done += 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Work> {
        let mut line = self.lock();
        loop {
            if let Some(work) = line.waiting.pop_front() {
                return Some(work);
            }
            if line.closed {
                return None;
            }
            line = self.changed.wait(line).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, work: Work, random: &mut Random) {
        match work {
            Work::WaitFor(mark) => mark.wait(),
            Work::Point => {}
            Work::Fail(status) => break_context(status),
            Work::Copy(copy) if context_works().is_ok() => {
                random.delay();
                copy.run();
            }
            Work::Launch(launch) if context_works().is_ok() => {
                random.delay();
                let number = self.lock().done + 1;
                launch.run((self.id, number));
            }
            Work::Copy(_) | Work::Launch(_) => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Copy {
    fn run(&self) {
        for row in 0..self.rows {
            let (host, device) =
                (self.host + row * self.host_pitch, self.device + row * self.device_pitch);
            let copied = match self.to_device {
                true => host::read(device, host, self.width),
                false => host::write(device, host, self.width),
            };
            if !copied {
                self.not_copied(device, host);
            }
        }
    }

    /// A row whose host memory is not there. If it is mapped, the file became shorter: a GPU has the pages that it was
    /// given and reads on.
    fn not_copied(&self, device: usize, host: usize) {
        let range = host..host + self.width;
        if host::is_mapped(&range) && self.to_device {
            // SAFETY: device memory, checked when the copy was queued.
            unsafe { std::ptr::write_bytes(device as *mut u8, POISON, self.width) };
            return;
        }
        let what = format!("host memory {range:#x?} of a queued copy is not mapped any more");
        if let Err(status) = violation::<()>(ILLEGAL_ADDRESS, &what) {
            break_context(status);
        }
    }
}

/// Numbers by splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Mostly none, now and then a short one, rarely a long one.
    fn delay(&mut self) {
        let most = config().delay_us.max(1);
        let micros = match self.next() % 64 {
            0 => most * 10,
            1..=15 => self.next() % most,
            _ => return,
        };
        if config().delay_us > 0 {
            std::thread::sleep(Duration::from_micros(micros));
        }
    }
}
