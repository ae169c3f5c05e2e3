//! Reads PTX into a list of operations, as far as `crc32.ptx` uses it. Whatever else occurs is refused: the machine is
//! to run what is there or nothing.

use std::collections::HashMap;

/// A register: an index into a thread's values. What the launch says comes first, then the four classes one behind the
/// other, then the constants of the text: an operand is always a register.
pub(crate) type Register = usize;

pub(crate) const THREAD: Register = 0;
pub(crate) const CTA: Register = 1;
pub(crate) const CTAS: Register = 2;
const SPECIALS: usize = 3;

/// How operands are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Unsigned(u32),
    Signed(u32),
}

impl Kind {
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::Unsigned(bits) | Self::Signed(bits) => bits,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Global and generic: what the machine's memory holds.
    Global,
    Shared,
    Parameter,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Code {
    Move,
    Add,
    Subtract,
    And,
    Or,
    Xor,
    Not,
    Negate,
    ShiftLeft,
    ShiftRight,
    Minimum,
    Maximum,
    MultiplyWide,
    /// To the kind of the operation, from this one.
    Convert(Kind),
    Compare(Compare),
    Select,
    Load(Space),
    Store(Space),
    ExchangeLanes,
    Branch(usize),
    Barrier,
    Return,
}

/// One operation. Loads and stores have an address and an offset as their first two operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) code: Code,
    pub(crate) kind: Kind,
    /// Runs only if the predicate has this value.
    pub(crate) guard: Option<(Register, bool)>,
    pub(crate) to: Register,
    pub(crate) from: [Register; 4],
}

/// A kernel.
pub(crate) struct Kernel {
    pub(crate) ops: Vec<Op>,
    /// A thread's values at the start: zeros, and the constants.
    pub(crate) values: Vec<u64>,
    pub(crate) threads: usize,
    pub(crate) parameters: Vec<usize>,
    pub(crate) shared_bytes: usize,
    /// Constants in global memory: address and bytes.
    pub(crate) globals: Vec<(u64, Vec<u8>)>,
}

/// Where the first of the constants lies, and the distance from one to the next.
const GLOBALS_AT: u64 = 0x7000_0000_0000;
const GLOBALS_APART: u64 = 1 << 32;

#[derive(Default)]
struct Reader {
    /// First register of each class, and their number in all.
    classes: HashMap<&'static str, usize>,
    registers: usize,
    constants: Vec<u64>,
    /// Places of parameters, shared memory and constants by name.
    symbols: HashMap<String, u64>,
    labels: HashMap<String, usize>,
    parameters: Vec<usize>,
    parameter_bytes: u64,
    shared_bytes: usize,
    globals: Vec<(u64, Vec<u8>)>,
    threads: usize,
}

/// Reads a module with one kernel.
pub(crate) fn read(text: &str) -> Kernel {
    let mut reader = Reader { registers: SPECIALS, ..Reader::default() };
    let lines: Vec<&str> =
        text.lines().map(|line| line.split("//").next().unwrap_or("").trim()).collect();
    let mut bodies = Vec::new();
    for line in lines.iter().filter(|line| !line.is_empty()) {
        if let Some(label) = line.strip_suffix(':') {
            reader.labels.insert(label.to_owned(), bodies.len());
        } else if line.starts_with('.') {
            reader.directive(line);
        } else if !matches!(*line, "{" | "}" | ")" | "(") {
            bodies.push(line.strip_suffix(';').unwrap_or_else(|| panic!("no operation: {line}")));
        }
    }
    let ops = bodies.iter().map(|body| reader.operation(body)).collect();
    let mut values = vec![0; reader.registers];
    values.extend(reader.constants);
    Kernel {
        ops,
        values,
        threads: reader.threads,
        parameters: reader.parameters,
        shared_bytes: reader.shared_bytes,
        globals: reader.globals,
    }
}

impl Reader {
    fn directive(&mut self, line: &str) {
        let words: Vec<&str> =
            line.split([' ', '\t', ',']).filter(|word| !word.is_empty()).collect();
        match words[0] {
            ".version" | ".target" | ".address_size" | ".visible" | ".pragma" => {}
            ".maxntid" => self.threads = words[1].parse().unwrap(),
            ".reg" => self.declare_registers(words[1], words[2]),
            ".param" => {
                let bytes = kind(&words[1][1..]).bits() as usize / 8;
                self.parameter_bytes = self.parameter_bytes.next_multiple_of(bytes as u64);
                self.symbols.insert(words[2].to_owned(), self.parameter_bytes);
                self.parameters.push(bytes);
                self.parameter_bytes += bytes as u64;
            }
            ".shared" => {
                let (name, len) = array(words.last().unwrap());
                self.symbols.insert(name.to_owned(), self.shared_bytes as u64);
                self.shared_bytes += len;
            }
            ".global" => self.declare_global(line),
            other => panic!("directive {other} is not understood: {line}"),
        }
    }

    /// `%r<1997>;`
    fn declare_registers(&mut self, class: &str, names: &str) {
        let (name, count) = names.split_once('<').unwrap();
        let class = ["%p", "%rs", "%r", "%rd"]
            .into_iter()
            .find(|known| *known == name)
            .unwrap_or_else(|| panic!("{class}"));
        self.classes.insert(class, self.registers);
        self.registers += count.split('>').next().unwrap().parse::<usize>().unwrap();
    }

    /// `.global .align 4 .b8 NAME[4096] = {0, 1};` or a number that nobody uses.
    fn declare_global(&mut self, line: &str) {
        let Some((head, values)) = line.split_once("= {") else { return };
        let (name, len) = array(head.split_whitespace().last().unwrap());
        let values = values.trim_end_matches("};").split(", ");
        let mut bytes: Vec<u8> = values.map(|value| value.parse().unwrap()).collect();
        bytes.resize(len, 0);
        let at = GLOBALS_AT + self.globals.len() as u64 * GLOBALS_APART;
        self.symbols.insert(name.to_owned(), at);
        self.globals.push((at, bytes));
    }

    fn operation(&mut self, body: &str) -> Op {
        let (guard, body) = match body.strip_prefix('@') {
            Some(rest) => {
                let (guard, rest) = rest.split_once(char::is_whitespace).unwrap();
                let name = guard.strip_prefix('!').unwrap_or(guard);
                (Some((self.register(name).unwrap(), name.len() == guard.len())), rest.trim())
            }
            None => (None, body),
        };
        let (name, operands) = body.split_once(char::is_whitespace).unwrap_or((body, ""));
        let parts: Vec<&str> = name.split('.').collect();
        let operands: Vec<&str> =
            operands.split(',').map(str::trim).filter(|text| !text.is_empty()).collect();
        let code = self.code(&parts, &operands);
        let kind = match parts.last() {
            _ if matches!(code, Code::Branch(_) | Code::Barrier | Code::Return) => {
                Kind::Unsigned(32)
            }
            // From a kind to another: the first of the two is the result's.
            _ if matches!(code, Code::Convert(_)) => kind(parts[parts.len() - 2]),
            Some(last) => kind(last),
            None => unreachable!(),
        };
        let mut op = Op { code, kind, guard, to: 0, from: [0; 4] };
        let from = match code {
            Code::Branch(_) | Code::Barrier | Code::Return => &[],
            Code::Store(_) => &operands[..],
            _ => {
                // `%r1|%p1`: what was exchanged, and whether the lane was there.
                let to = operands[0].split('|').next().unwrap();
                op.to = self.register(to).unwrap_or_else(|| panic!("{body}"));
                &operands[1..]
            }
        };
        let mut at = 0;
        for operand in from {
            if let Some(place) = operand.strip_prefix('[') {
                let place = place.trim_end_matches(']');
                let (base, offset) = place.split_once('+').unwrap_or((place, "0"));
                op.from[at] = self.operand(base);
                op.from[at + 1] = self.operand(offset);
                at += 2;
            } else {
                op.from[at] = self.operand(operand);
                at += 1;
            }
        }
        op
    }

    fn code(&self, parts: &[&str], operands: &[&str]) -> Code {
        match parts[0] {
            "mov" | "cvta" => Code::Move,
            "add" => Code::Add,
            "sub" => Code::Subtract,
            "and" => Code::And,
            "or" => Code::Or,
            "xor" => Code::Xor,
            "not" => Code::Not,
            "neg" => Code::Negate,
            "shl" => Code::ShiftLeft,
            "shr" => Code::ShiftRight,
            "min" => Code::Minimum,
            "max" => Code::Maximum,
            "mul" if parts[1] == "wide" => Code::MultiplyWide,
            "cvt" if parts.len() == 3 => Code::Convert(kind(parts[2])),
            "setp" if parts.len() == 3 => Code::Compare(compare(parts[1])),
            "selp" => Code::Select,
            "ld" => Code::Load(space(parts)),
            "st" => Code::Store(space(parts)),
            "shfl" if parts[1..3] == ["sync", "bfly"] => Code::ExchangeLanes,
            "bra" => Code::Branch(self.labels[operands[0]]),
            "bar" if operands == ["0"] => Code::Barrier,
            "ret" => Code::Return,
            _ => panic!("operation {parts:?} is not understood"),
        }
    }

    fn operand(&mut self, text: &str) -> Register {
        if let Some(register) = self.register(text) {
            return register;
        }
        match text {
            "%tid.x" => THREAD,
            "%ctaid.x" => CTA,
            "%nctaid.x" => CTAS,
            _ => {
                let number = text.parse::<i64>().ok().map(|value| value as u64);
                let value = number.or_else(|| self.symbols.get(text).copied());
                self.constants.push(value.unwrap_or_else(|| panic!("operand {text} is unknown")));
                self.registers + self.constants.len() - 1
            }
        }
    }

    fn register(&self, text: &str) -> Option<Register> {
        let digits = text.find(|character: char| character.is_ascii_digit())?;
        let (class, number) = text.split_at(digits);
        Some(self.classes.get(class)? + number.parse::<usize>().ok()?)
    }
}

/// `NAME[32]`
fn array(text: &str) -> (&str, usize) {
    let (name, len) = text.trim_end_matches([';', ']']).split_once('[').unwrap();
    (name, len.parse().unwrap())
}

fn kind(text: &str) -> Kind {
    if text == "pred" {
        return Kind::Unsigned(1);
    }
    let bits = text[1..].parse().unwrap_or_else(|_| panic!("kind {text} is not understood"));
    match &text[..1] {
        "s" => Kind::Signed(bits),
        "u" | "b" => Kind::Unsigned(bits),
        _ => panic!("kind {text} is not understood"),
    }
}

fn compare(text: &str) -> Compare {
    match text {
        "eq" => Compare::Eq,
        "ne" => Compare::Ne,
        "lt" => Compare::Lt,
        "le" => Compare::Le,
        "gt" => Compare::Gt,
        "ge" => Compare::Ge,
        _ => panic!("comparison {text} is not understood"),
    }
}

fn space(parts: &[&str]) -> Space {
    match parts[1] {
        "shared" => Space::Shared,
        "param" => Space::Parameter,
        _ => Space::Global,
    }
}
