//! The input and the place in it. Every length is compared with what is left.

use forebay_error::{Code, Error, Result};

pub(super) struct Cursor<'a> {
    input: &'a [u8],
    pos: usize,
    /// Where the current opcode is: the place that errors name.
    pub(super) opcode_at: usize,
    code: Code,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(input: &'a [u8], code: Code) -> Self {
        Self { input, pos: 0, opcode_at: 0, code }
    }

    pub(super) fn pos(&self) -> usize {
        self.pos
    }

    /// An error of the pickle's own code that names the byte of the current opcode.
    #[cold]
    pub(super) fn fault(&self, what: impl std::fmt::Display) -> Error {
        Error::new(self.code, format!("damaged pickle: {what}, at byte {}", self.opcode_at))
    }

    #[inline]
    pub(super) fn opcode(&mut self) -> Result<u8> {
        self.opcode_at = self.pos;
        self.u8()
    }

    #[inline]
    pub(super) fn u8(&mut self) -> Result<u8> {
        match self.input.get(self.pos) {
            Some(&byte) => {
                self.pos += 1;
                Ok(byte)
            }
            None => Err(self.short(1)),
        }
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        match self.input.get(self.pos..).and_then(|rest| rest.first_chunk()) {
            Some(bytes) => {
                self.pos += N;
                Ok(*bytes)
            }
            None => Err(self.short(N as u64)),
        }
    }

    #[inline]
    pub(super) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    #[inline]
    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    #[inline]
    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn f64(&mut self) -> Result<f64> {
        Ok(f64::from_be_bytes(self.array()?))
    }

    /// The next `len` bytes; fails before anything is taken where they are not there.
    #[inline]
    pub(super) fn take(&mut self, len: u64) -> Result<&'a [u8]> {
        let bytes = usize::try_from(len)
            .ok()
            .and_then(|len| self.pos.checked_add(len))
            .and_then(|end| self.input.get(self.pos..end));
        match bytes {
            Some(bytes) => {
                self.pos += bytes.len();
                Ok(bytes)
            }
            None => Err(self.short(len)),
        }
    }

    /// Up to the next line feed, which is taken too.
    pub(super) fn line(&mut self) -> Result<&'a [u8]> {
        let rest = self.input.get(self.pos..).unwrap_or_default();
        let Some(len) = rest.iter().position(|&byte| byte == b'\n') else {
            return Err(self.fault("a line does not end"));
        };
        self.pos += len + 1;
        Ok(rest.get(..len).unwrap_or_default())
    }

    /// A frame says how much follows; it must be there.
    pub(super) fn check_left(&self, len: u64) -> Result<()> {
        match len <= self.left() {
            true => Ok(()),
            false => Err(self.short(len)),
        }
    }

    fn left(&self) -> u64 {
        (self.input.len() - self.pos) as u64
    }

    #[cold]
    fn short(&self, len: u64) -> Error {
        let left = self.left();
        self.fault(format!("{len} bytes are wanted where {left} are left"))
    }
}
