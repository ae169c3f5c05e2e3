//! What all calls share, under one lock, as in the real driver: while memory is registered, every other call waits.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::check::{context_works, violation};
use crate::config::config;
use crate::device::DeviceMemory;
use crate::host::Registrations;
use crate::kernel::Modules;
use crate::status::{INVALID_CONTEXT, INVALID_HANDLE, NOT_INITIALIZED, Outcome, UNKNOWN};
use crate::stream::{Mark, Stream, Work};

/// The handle of the one context; an address that nobody can use.
pub(crate) const CONTEXT: usize = 0x51c0;

/// The default stream in both its spellings, and the one of each thread (which is the same one here).
const DEFAULT_STREAMS: [usize; 3] = [0, 1, 2];

thread_local! {
    /// The thread's current context, 0 for none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// The thread's stream capture mode; global (0) at first.
    static CAPTURE_MODE: Cell<i32> = const { Cell::new(0) };
}

/// The driver's state.
pub(crate) struct State {
    pub(crate) memory: DeviceMemory,
    pub(crate) registrations: Registrations,
    pub(crate) copies: u64,
    pub(crate) kernels: Modules,
    streams: HashMap<usize, Arc<Stream>>,
    /// `None`: never recorded, which counts as reached.
    events: HashMap<usize, Option<Mark>>,
    handles: usize,
    /// Copies that the caller does not know to be done, by stream and number.
    pending: BTreeMap<(u64, u64), Pending>,
    /// Device memory of launches, likewise.
    launched: BTreeMap<(u64, u64), Vec<Range<u64>>>,
    /// What a stream waited for: (stream, number) is later than the mark.
    waits: BTreeMap<(u64, u64), (u64, u64)>,
}

/// The memory of a copy.
pub(crate) struct Pending {
    pub(crate) host: Range<usize>,
    pub(crate) device: Range<u64>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Makes the state, at the first `cuInit`.
#[expect(clippy::print_stderr, reason = "a failure must be repeatable from its log")]
pub(crate) fn initialise() -> Outcome {
    let mut state = lock();
    if state.is_none() {
        let config = config();
        *state = Some(State::new(config.alloc_limit)?);
        eprintln!("simgpu: simulated GPU, SIMGPU_SEED={}", config.seed);
    }
    Ok(())
}

/// Runs a call that needs no context.
pub(crate) fn with_driver<T>(body: impl FnOnce(&mut State) -> Outcome<T>) -> Outcome<T> {
    match lock().as_mut() {
        Some(state) => body(state),
        None => Err(NOT_INITIALIZED),
    }
}

/// Runs a call that needs a current context, and one that works.
pub(crate) fn with_context<T>(
    call: &str,
    body: impl FnOnce(&mut State) -> Outcome<T>,
) -> Outcome<T> {
    with_driver(|state| {
        if CURRENT.get() == 0 {
            return violation(INVALID_CONTEXT, &format!("{call} without a current context"));
        }
        context_works()?;
        body(state)
    })
}

/// Waits for a point, without the lock; from then on the caller knows that all before it is done.
pub(crate) fn wait_for(mark: &Mark) -> Outcome {
    mark.wait();
    with_driver(|state| {
        state.learn(mark);
        context_works()
    })
}

fn lock() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a context current: ours or none.
pub(crate) fn set_current(context: usize) -> Outcome {
    if context != 0 && context != CONTEXT {
        return violation(INVALID_CONTEXT, &format!("no context has the handle {context:#x}"));
    }
    CURRENT.set(context);
    Ok(())
}

pub(crate) fn current() -> usize {
    CURRENT.get()
}

pub(crate) fn exchange_capture_mode(mode: i32) -> i32 {
    CAPTURE_MODE.replace(mode)
}

impl State {
    fn new(limit: u64) -> Outcome<Self> {
        Ok(Self {
            memory: DeviceMemory::new(limit)?,
            registrations: Registrations::default(),
            copies: 0,
            kernels: Modules::default(),
            streams: HashMap::new(),
            events: HashMap::new(),
            handles: 0,
            pending: BTreeMap::new(),
            launched: BTreeMap::new(),
            waits: BTreeMap::new(),
        })
    }

    /// A handle that never was one before, so that a stale one is found out.
    pub(crate) fn fresh_handle(&mut self) -> usize {
        self.handles += 1;
        0x1_0000 + self.handles * 16
    }

    pub(crate) fn create_stream(&mut self) -> Outcome<*mut c_void> {
        let handle = self.fresh_handle();
        let stream = Stream::start(handle as u64).map_err(|_| UNKNOWN)?;
        self.streams.insert(handle, stream);
        Ok(handle as *mut c_void)
    }

    /// What is queued still runs.
    pub(crate) fn destroy_stream(&mut self, handle: usize) -> Outcome {
        match self.streams.remove(&handle) {
            Some(stream) if !DEFAULT_STREAMS.contains(&handle) => {
                stream.close();
                Ok(())
            }
            _ => violation(INVALID_HANDLE, &format!("no stream {handle:#x} to destroy")),
        }
    }

    pub(crate) fn stream(&mut self, handle: usize) -> Outcome<Arc<Stream>> {
        let default = DEFAULT_STREAMS.contains(&handle);
        let handle = if default { 0 } else { handle };
        if let Some(stream) = self.streams.get(&handle) {
            return Ok(stream.clone());
        }
        if !default {
            return violation(INVALID_HANDLE, &format!("no stream has the handle {handle:#x}"));
        }
        let stream = Stream::start(0).map_err(|_| UNKNOWN)?;
        self.streams.insert(0, stream.clone());
        Ok(stream)
    }

    pub(crate) fn create_event(&mut self) -> *mut c_void {
        let handle = self.fresh_handle();
        self.events.insert(handle, None);
        handle as *mut c_void
    }

    /// Who waits for it already keeps its point.
    pub(crate) fn destroy_event(&mut self, handle: usize) -> Outcome {
        self.event(handle)?;
        self.events.remove(&handle);
        Ok(())
    }

    /// The point where an event was recorded last.
    pub(crate) fn event(&self, handle: usize) -> Outcome<Option<Mark>> {
        match self.events.get(&handle) {
            Some(mark) => Ok(mark.clone()),
            None => violation(INVALID_HANDLE, &format!("no event has the handle {handle:#x}")),
        }
    }

    pub(crate) fn record(&mut self, event: usize, stream: usize) -> Outcome {
        self.event(event)?;
        let mark = self.stream(stream)?.queue(Work::Point);
        self.events.insert(event, Some(mark));
        Ok(())
    }

    pub(crate) fn stream_wait(&mut self, stream: usize, event: usize) -> Outcome {
        let stream = self.stream(stream)?;
        if let Some(mark) = self.event(event)? {
            let before = (mark.stream.id, mark.number);
            let here = stream.queue(Work::WaitFor(mark));
            self.waits.insert((here.stream.id, here.number), before);
        }
        Ok(())
    }

    /// Notes the memory of a copy until the caller knows that it is done.
    pub(crate) fn hold(&mut self, mark: &Mark, pending: Pending) {
        self.pending.insert((mark.stream.id, mark.number), pending);
    }

    /// Notes more memory of a launch, likewise.
    pub(crate) fn hold_for_kernel(&mut self, key: (u64, u64), ranges: Vec<Range<u64>>) {
        self.launched.entry(key).or_default().extend(ranges);
    }

    /// The caller knows that all up to a point is done, and so all that came before what was waited for there.
    pub(crate) fn learn(&mut self, mark: &Mark) {
        let mut known = vec![(mark.stream.id, mark.number)];
        while let Some((stream, number)) = known.pop() {
            let range = (stream, 0)..=(stream, number);
            take_range(&mut self.pending, range.clone());
            take_range(&mut self.launched, range.clone());
            known.extend(take_range(&mut self.waits, range));
        }
    }

    /// A violation if copies use host memory that is to be unregistered.
    pub(crate) fn check_host_unused(&self, range: &Range<usize>) -> Outcome {
        let uses =
            |pending: &Pending| pending.host.start < range.end && range.start < pending.host.end;
        self.check_unused(uses, || format!("host memory {range:#x?} unregistered"))
    }

    /// A violation if copies use device memory that is to be freed.
    pub(crate) fn check_device_unused(&self, range: &Range<u64>) -> Outcome {
        let uses = |pending: &Pending| {
            pending.device.start < range.end && range.start < pending.device.end
        };
        self.check_unused(uses, || format!("device memory {range:#x?} freed"))?;
        let mut launched = self.launched.values().flatten();
        match launched.find(|used| used.start < range.end && range.start < used.end) {
            Some(used) => {
                let uses = format!("before a kernel that uses {used:#x?} was waited for");
                let what = format!("device memory {range:#x?} freed {uses}");
                violation(crate::status::INVALID_VALUE, &what)
            }
            None => Ok(()),
        }
    }

    fn check_unused(
        &self,
        uses: impl Fn(&Pending) -> bool,
        what: impl FnOnce() -> String,
    ) -> Outcome {
        match self.pending.values().find(|pending| uses(pending)) {
            Some(Pending { host, device }) => {
                let copy = format!("host {host:#x?}, device {device:#x?}");
                let what = format!("{} before its copy was waited for ({copy})", what());
                violation(crate::status::INVALID_VALUE, &what)
            }
            None => Ok(()),
        }
    }
}

/// Removes a range of a map and gives what was there.
fn take_range<V>(
    map: &mut BTreeMap<(u64, u64), V>,
    range: std::ops::RangeInclusive<(u64, u64)>,
) -> Vec<V> {
    let keys: Vec<_> = map.range(range).map(|(&key, _)| key).collect();
    keys.iter().filter_map(|key| map.remove(key)).collect()
}
