//! Runs a kernel, thread by thread, with every access to memory checked.
//!
//! A thread runs until it must wait for others: at an exchange between lanes for the rest of its warp, which must come
//! to the same one, at a barrier for the rest of its CTA.

use crate::ptx::{CTA, CTAS, Code, Compare, Kernel, Kind, Op, Space, THREAD};

const WARP: usize = 32;

/// Operations that one thread may run: a loop that does not end is found out.
const OPS_MAX: u64 = 50_000_000;

/// A piece of global memory.
pub(crate) struct Piece {
    pub(crate) at: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) writable: bool,
}

/// Global memory: nothing but these may be touched.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) pieces: Vec<Piece>,
}

impl Memory {
    fn piece(&mut self, at: u64, len: usize) -> (&mut Piece, usize) {
        assert_eq!(at % len as u64, 0, "access of {len} bytes at {at:#x} is not aligned");
        let inside = |piece: &Piece| {
            at >= piece.at && at + len as u64 <= piece.at + piece.bytes.len() as u64
        };
        let found = self.pieces.iter().position(inside);
        let found =
            found.unwrap_or_else(|| panic!("access of {len} bytes at {at:#x}, which is nobody's"));
        // The next access is likely to be in the same piece.
        self.pieces.swap(0, found);
        let piece = &mut self.pieces[0];
        let offset = (at - piece.at) as usize;
        (piece, offset)
    }
}

struct Thread {
    index: usize,
    at: usize,
    values: Vec<u64>,
    ran: u64,
}

/// What a thread stops at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    Lanes,
    Barrier,
    End,
}

struct Cta<'a> {
    kernel: &'a Kernel,
    memory: &'a mut Memory,
    parameters: &'a [u8],
    shared: Vec<u8>,
    index: u64,
    count: u64,
}

/// Runs the kernel with `ctas` CTAs, one after the other.
pub(crate) fn launch(kernel: &Kernel, memory: &mut Memory, ctas: u64, parameters: &[u64]) {
    let mut bytes = Vec::new();
    assert_eq!(parameters.len(), kernel.parameters.len());
    for (value, &len) in parameters.iter().zip(&kernel.parameters) {
        bytes.resize(bytes.len().next_multiple_of(len), 0);
        bytes.extend(&value.to_le_bytes()[..len]);
    }
    for (at, constants) in &kernel.globals {
        memory.pieces.push(Piece { at: *at, bytes: constants.clone(), writable: false });
    }
    for index in 0..ctas {
        let shared = vec![0xEE; kernel.shared_bytes];
        Cta { kernel, memory, parameters: &bytes, shared, index, count: ctas }.run();
    }
}

impl Cta<'_> {
    fn run(mut self) {
        let fresh = |index| {
            let mut values = self.kernel.values.clone();
            (values[THREAD], values[CTA], values[CTAS]) = (index as u64, self.index, self.count);
            Thread { index, at: 0, values, ran: 0 }
        };
        let mut threads: Vec<Thread> = (0..self.kernel.threads).map(fresh).collect();
        loop {
            let stops: Vec<Stop> = (0..threads.len() / WARP)
                .map(|warp| self.warp(&mut threads[warp * WARP..][..WARP]))
                .collect();
            assert!(stops.iter().all(|stop| *stop == stops[0]), "warps part ways: {stops:?}");
            if stops[0] == Stop::End {
                return;
            }
            assert!(threads.iter().all(|thread| thread.at == threads[0].at), "two barriers");
            threads.iter_mut().for_each(|thread| thread.at += 1);
        }
    }

    /// Runs a warp up to a barrier or the end.
    fn warp(&mut self, lanes: &mut [Thread]) -> Stop {
        loop {
            let stops: Vec<Stop> = lanes.iter_mut().map(|lane| self.thread(lane)).collect();
            let same = lanes.iter().all(|lane| lane.at == lanes[0].at);
            assert!(
                same && stops.iter().all(|stop| *stop == stops[0]),
                "lanes part ways: {stops:?}"
            );
            if stops[0] != Stop::Lanes {
                return stops[0];
            }
            exchange(&self.kernel.ops[lanes[0].at], lanes);
        }
    }

    fn thread(&mut self, thread: &mut Thread) -> Stop {
        let kernel = self.kernel;
        loop {
            let op = &kernel.ops[thread.at];
            thread.ran += 1;
            assert!(thread.ran < OPS_MAX, "thread {} does not end", thread.index);
            if let Some((register, wanted)) = op.guard
                && (thread.values[register] != 0) != wanted
            {
                thread.at += 1;
                continue;
            }
            let [a, b, c, _] = op.from;
            let values = &mut thread.values;
            match op.code {
                Code::ExchangeLanes => return Stop::Lanes,
                Code::Barrier => return Stop::Barrier,
                Code::Return => return Stop::End,
                Code::Branch(to) => {
                    thread.at = to;
                    continue;
                }
                // Most of all are these.
                Code::Xor => values[op.to] = cut(values[a] ^ values[b], op.kind.bits()),
                Code::Store(space) => {
                    let at = values[a].wrapping_add(values[b]);
                    self.store(space, at, values[c], op.kind.bits() as usize / 8);
                }
                Code::Load(space) => {
                    let at = values[a].wrapping_add(values[b]);
                    values[op.to] = self.load(space, at, op.kind.bits() as usize / 8);
                }
                _ => values[op.to] = compute(op, [values[a], values[b], values[c]]),
            }
            thread.at += 1;
        }
    }

    fn load(&mut self, space: Space, at: u64, len: usize) -> u64 {
        let (bytes, at) = match space {
            Space::Parameter => (self.parameters, at as usize),
            Space::Shared => (&self.shared[..], at as usize),
            Space::Global => {
                let (piece, offset) = self.memory.piece(at, len);
                (&piece.bytes[..], offset)
            }
        };
        let mut value = [0; 8];
        value[..len].copy_from_slice(&bytes[at..at + len]);
        u64::from_le_bytes(value)
    }

    fn store(&mut self, space: Space, at: u64, value: u64, len: usize) {
        let value = &value.to_le_bytes()[..len];
        match space {
            Space::Parameter => panic!("store to a parameter"),
            Space::Shared => self.shared[at as usize..][..len].copy_from_slice(value),
            Space::Global => {
                let (piece, offset) = self.memory.piece(at, len);
                assert!(piece.writable, "store to {at:#x}, which is not for that");
                piece.bytes[offset..][..len].copy_from_slice(value);
            }
        }
    }
}

fn exchange(op: &Op, lanes: &mut [Thread]) {
    let [from, apart, clamp, members] = op.from;
    let values: Vec<u64> = lanes.iter().map(|lane| lane.values[from]).collect();
    for (index, lane) in lanes.iter_mut().enumerate() {
        let all = (lane.values[clamp], lane.values[members] as u32) == (31, u32::MAX);
        assert!(all, "all lanes of the warp");
        lane.values[op.to] = values[index ^ lane.values[apart] as usize];
        lane.at += 1;
    }
}

fn compute(op: &Op, [a, b, c]: [u64; 3]) -> u64 {
    let bits = op.kind.bits();
    let result = match op.code {
        Code::Move => a,
        Code::Add => a.wrapping_add(b),
        Code::Subtract => a.wrapping_sub(b),
        Code::And => a & b,
        Code::Or => a | b,
        Code::Not => !a,
        Code::Negate => a.wrapping_neg(),
        // Shifts by the width and more give what is left when all bits are gone.
        Code::ShiftLeft => cut(b, 32).try_into().ok().and_then(|by| a.checked_shl(by)).unwrap_or(0),
        Code::ShiftRight => (wide(a, op.kind) >> cut(b, 32).min(64)) as u64,
        Code::Minimum => wide(a, op.kind).min(wide(b, op.kind)) as u64,
        Code::Maximum => wide(a, op.kind).max(wide(b, op.kind)) as u64,
        Code::MultiplyWide => return (wide(a, op.kind) * wide(b, op.kind)) as u64,
        Code::Convert(from) => wide(a, from) as u64,
        Code::Compare(compare) => {
            let (a, b) = (wide(a, op.kind), wide(b, op.kind));
            return u64::from(match compare {
                Compare::Eq => a == b,
                Compare::Ne => a != b,
                Compare::Lt => a < b,
                Compare::Le => a <= b,
                Compare::Gt => a > b,
                Compare::Ge => a >= b,
            });
        }
        Code::Select => [b, a][usize::from(c != 0)],
        _ => unreachable!("{op:?}"),
    };
    cut(result, bits)
}

fn cut(value: u64, bits: u32) -> u64 {
    if bits == 64 { value } else { value & ((1 << bits) - 1) }
}

/// The number that a register's bits stand for.
fn wide(value: u64, kind: Kind) -> i128 {
    match kind {
        Kind::Unsigned(bits) => i128::from(cut(value, bits)),
        Kind::Signed(bits) => i128::from((value << (64 - bits)) as i64 >> (64 - bits)),
    }
}
