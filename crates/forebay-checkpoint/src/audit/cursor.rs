//! Reads the primitives of manifests off a slice; faults are texts.

pub(super) type Check<T> = Result<T, String>;

pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(super) fn slice(&mut self, count: u64) -> Check<&'a [u8]> {
        let cut = usize::try_from(count).ok().and_then(|count| self.0.split_at_checked(count));
        let (head, rest) = cut.ok_or(format!("{count} bytes expected, {} left", self.0.len()))?;
        self.0 = rest;
        Ok(head)
    }

    pub(super) fn byte(&mut self) -> Check<u8> {
        let (&byte, rest) = self.0.split_first().ok_or("a byte expected, none left")?;
        self.0 = rest;
        Ok(byte)
    }

    /// Seven bits a byte, lowest first, in the shortest way.
    pub(super) fn varint(&mut self) -> Check<u64> {
        let mut value = 0u128;
        for position in 0..10 {
            let byte = self.byte()?;
            value += u128::from(byte % 128) << (7 * position);
            if byte < 128 {
                if byte == 0 && position > 0 {
                    return Err("a number with a needless byte".into());
                }
                return u64::try_from(value).map_err(|_| "a number of more than 64 bits".into());
            }
        }
        Err("a number of more than ten bytes".into())
    }

    /// `before` and a zigzag difference, modulo 2^64.
    pub(super) fn difference(&mut self, before: u64) -> Check<u64> {
        let coded = self.varint()?;
        let half = coded / 2;
        Ok(match coded % 2 {
            0 => before.wrapping_add(half),
            _ => before.wrapping_sub(half).wrapping_sub(1),
        })
    }

    pub(super) fn text(&mut self) -> Check<&'a str> {
        let len = self.varint()?;
        std::str::from_utf8(self.slice(len)?).map_err(|_| "a text that is not UTF-8".into())
    }

    pub(super) fn little(&mut self, bytes: u64) -> Check<u64> {
        let slice = self.slice(bytes)?;
        Ok(slice.iter().rev().fold(0, |value, &byte| value * 256 + u64::from(byte)))
    }

    pub(super) fn crc(&mut self) -> Check<u32> {
        // Four bytes fit.
        self.little(4).map(|value| value as u32)
    }

    pub(super) fn digest(&mut self) -> Check<[u8; 32]> {
        self.slice(32)?.try_into().map_err(|_| "no hash of 32 bytes".into())
    }

    /// A count of things of at least one byte each.
    pub(super) fn count(&mut self) -> Check<usize> {
        let count = self.varint()?;
        let fits = usize::try_from(count).ok().filter(|&count| count <= self.0.len());
        fits.ok_or(format!("{count} things in {} bytes", self.0.len()))
    }

    pub(super) fn done(&self) -> Check<()> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("{} bytes left over", self.0.len())) }
    }
}
