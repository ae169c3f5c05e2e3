//! What goes wrong, and when: steps, faults, and plans that give faults to steps.

use std::time::Duration;

/// What a client asked of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// [`Store::get`](crate::Store::get).
    Get,
    /// [`Store::create`](crate::Store::create).
    Create,
    /// [`Store::put`](crate::Store::put), which is also how something is staged.
    Put,
    /// [`Store::list`](crate::Store::list).
    List,
    /// [`Store::names`](crate::Store::names).
    Names,
    /// [`Store::remove`](crate::Store::remove).
    Remove,
    /// [`Store::publish`](crate::Store::publish).
    Publish,
    /// [`Store::create_data`](crate::Store::create_data): where room is set aside.
    CreateData,
    /// One write of a data object's sink.
    Write,
    /// [`DataObject::seal`](crate::DataObject::seal).
    Seal,
    /// [`Store::open_data`](crate::Store::open_data).
    OpenData,
    /// One read of an object that was opened.
    Read,
    /// What a store in a folder asks of the kernel, see [`FaultFolder`](super::FaultFolder).
    File(Call),
}

/// A call of a store in a folder that changes something, by the system call's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// mkdir.
    Mkdir,
    /// open with O_CREAT and O_EXCL.
    Open,
    /// pwrite.
    Pwrite,
    /// fallocate.
    Fallocate,
    /// ftruncate.
    Ftruncate,
    /// fsync of a file.
    Fsync,
    /// fsync of a folder.
    FsyncFolder,
    /// link.
    Link,
    /// rename.
    Rename,
    /// renameat2 where nothing may be.
    RenameNew,
    /// unlink.
    Unlink,
    /// rmdir.
    Rmdir,
    /// flock of a file that is made for it.
    Flock,
}

impl Action {
    /// Whether it changes what is stored. Such an action is two steps, before and after the change.
    pub fn changes(self) -> bool {
        !matches!(self, Self::Get | Self::List | Self::Names | Self::OpenData | Self::Read)
    }

    /// Whether it promises that its change survives a loss of power.
    pub fn is_durable(self) -> bool {
        self.changes() && !matches!(self, Self::CreateData | Self::Write | Self::File(_))
    }

    /// Whether a full disk can stop it.
    pub fn needs_room(self) -> bool {
        match self {
            Self::File(call) => !matches!(call, Call::Unlink | Call::Rmdir | Call::FsyncFolder),
            Self::Create | Self::Put | Self::Publish | Self::CreateData | Self::Write => true,
            _ => false,
        }
    }

    /// Whether it is a write of bytes, of which a part can be done.
    pub(super) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::File(Call::Pwrite))
    }
}

/// On which side of its effect a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum When {
    /// Nothing was changed yet.
    Before,
    /// The change has happened, the caller does not know yet.
    After,
}

/// An instant at which something can go wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Counted from 0 over the calls of one client.
    pub index: u64,
    /// What was asked.
    pub action: Action,
    /// On which side of the effect.
    pub when: When,
    /// The object or prefix; `staged -> to` for a publication.
    pub key: String,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The system says this errno. Before the effect nothing has happened, after it the change is there all the same.
    /// ENOSPC and EDQUOT only strike where room is needed, before the effect.
    Errno(i32),
    /// A write leaves the first half of its bytes and fails with EIO. Any other action is one step by the store's
    /// promise, so it fails with EIO.
    Torn,
    /// A read or write does half of what it was asked, and says so. Nothing else is touched.
    Short,
    /// The change happens and the caller gets ETIMEDOUT.
    LostReply,
    /// The change happens and cannot be forced to the disk: `not_durable`. Strikes calls that promise both.
    NotDurable,
    /// The step takes that long.
    Slow(Duration),
    /// The client is gone: this call and all later ones of this client fail and change nothing (this one has already,
    /// after the effect). Other clients of the same store go on.
    Kill,
}

impl Fault {
    /// Whether a step feels it.
    fn strikes(self, action: Action, when: When) -> bool {
        match self {
            Self::Errno(libc::ENOSPC | libc::EDQUOT) => action.needs_room() && when == When::Before,
            Self::Short => (action == Action::Read || action.writes()) && when == When::Before,
            Self::LostReply => action.changes(),
            Self::NotDurable => action.is_durable() && when == When::Before,
            Self::Errno(_) | Self::Torn | Self::Slow(_) | Self::Kill => true,
        }
    }
}

/// Which step gets which fault. Plans are values: the same plan over the same calls does the same.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    rule: Rule,
}

#[derive(Clone, Debug, Default)]
enum Rule {
    #[default]
    None,
    At(u64, Fault),
    From(u64, Fault),
    Seeded {
        seed: u64,
        one_in: u64,
        faults: Vec<Fault>,
    },
}

impl Plan {
    /// No faults: for counting the steps.
    pub fn none() -> Self {
        Self::default()
    }

    /// One fault at one step.
    pub fn at(step: u64, fault: Fault) -> Self {
        Self { rule: Rule::At(step, fault) }
    }

    /// The fault at that step and every later one: a disk that stays full, a server that stays slow.
    pub fn from(step: u64, fault: Fault) -> Self {
        Self { rule: Rule::From(step, fault) }
    }

    /// At each step, with a chance of one in `one_in`, one of the faults. Errors name the seed.
    pub fn seeded(seed: u64, one_in: u64, faults: &[Fault]) -> Self {
        Self { rule: Rule::Seeded { seed, one_in: one_in.max(1), faults: faults.to_vec() } }
    }

    /// The seed of a seeded plan.
    pub fn seed(&self) -> Option<u64> {
        match self.rule {
            Rule::Seeded { seed, .. } => Some(seed),
            _ => None,
        }
    }

    pub(super) fn fault(&self, index: u64, action: Action, when: When) -> Option<Fault> {
        let fault = match &self.rule {
            Rule::None => None,
            Rule::At(step, fault) => (index == *step).then_some(*fault),
            Rule::From(step, fault) => (index >= *step).then_some(*fault),
            Rule::Seeded { seed, one_in, faults } => {
                let random = mix(seed ^ mix(index));
                let pick = usize::try_from(random >> 32).unwrap_or(0) % faults.len().max(1);
                let hit = (random & 0xffff_ffff).is_multiple_of(*one_in);
                faults.get(pick).copied().filter(|_| hit)
            }
        };
        fault.filter(|fault| fault.strikes(action, when))
    }
}

/// The finalizer of SplitMix64: 64 bits in, 64 bits that look random out.
pub(crate) fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
